"""A request on the scheduler's side, from its arrival to its end, as a state machine.

NEW -> LOOKING_UP <-> WAITING
           |  ^
           v  |
        LOADING          and from each of them to FINISHED
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.shared.key_scope import ALL, Doubt, KeyScope
from kvtier.connectors.vllm.shared.prompt import RequestBlocks
from kvtier.core.errors import printable
from kvtier.plan.decide import Awaited, GivenUp, Wait

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Phase of a request on the scheduler's side."""

    NEW = "new"
    """Nothing was looked up for it yet."""
    LOOKING_UP = "looking up"
    """Its blocks are looked up, or were: vLLM may compute it, or look it up again."""
    WAITING = "waiting"
    """It waits for blocks, or for answers of stores."""
    LOADING = "loading"
    """vLLM copies blocks to the device for it."""
    FINISHED = "finished"
    """vLLM has reported its end. Copies of its blocks may end later."""


LEGAL = {
    Phase.NEW: {Phase.LOOKING_UP, Phase.FINISHED},
    Phase.LOOKING_UP: {Phase.LOOKING_UP, Phase.WAITING, Phase.LOADING, Phase.FINISHED},
    Phase.WAITING: {Phase.LOOKING_UP, Phase.FINISHED},
    Phase.LOADING: {Phase.LOOKING_UP, Phase.FINISHED},
    Phase.FINISHED: set(),
}
"""The phases that may follow each one."""


class Way(Enum):
    """Way of a block from storage to the device."""

    PROMOTED = "promoted"
    """It was read into host memory for this request."""
    DIRECT = "direct"
    """It is to be read directly to the device."""
    READ = "read"
    """It was read directly, and is not in host memory."""


@dataclass(slots=True)
class LookUp:
    """A look-up of a request's blocks.

    Attributes:
        num_computed: tokens that the device had.
        waited_s: how long the request has waited until its blocks were ready.
        found: state of each block behind these tokens; None before vLLM's first query.
        answers: look-ups in stores that are worth waiting for.
        met: states of the blocks that vLLM has queried, in that order.
    """

    num_computed: int = 0
    waited_s: float = 0.0
    found: dict[bytes, BlockState] | None = None
    answers: Sequence[Awaited] = ()
    met: dict[bytes, BlockState] = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestState:
    """State of one request. Its phase is changed by its methods only."""

    is_strict: ClassVar[bool] = False
    """Whether a change of phase that is not legal raises. Tests switch it on."""

    request: RequestBlocks
    """Its blocks, and what its client asked for."""
    scope: KeyScope = field(default_factory=KeyScope)
    """Decides which blocks may be kept."""
    phase: Phase = Phase.NEW
    """Phase between arrival and end."""
    lookup: LookUp = field(default_factory=LookUp)
    """Its last look-up."""
    wait: Wait | None = None
    """Its wait in the phase ``WAITING``."""
    since_s: float | None = None
    """When it began to wait for its blocks, or for the load in the phase ``LOADING``."""
    given_up: GivenUp | None = None
    """Why it waits no more, and takes only what is in memory."""
    ways: dict[bytes, Way] = field(default_factory=dict)
    """Way of each block in storage to the device."""
    limit: int = ALL
    """No block that ends beyond this token is loaded."""
    declined: set[bytes] = field(default_factory=set)
    """Blocks that were found but are recomputed, because loading would take longer."""

    # -- phases ------------------------------------------------------------------------------------

    def begin_look_up(self, num_computed: int) -> None:
        """Begin a look-up of its blocks behind so many tokens, which the device has."""
        self._enter(Phase.LOOKING_UP)
        self.lookup = LookUp(num_computed, self.lookup.waited_s)
        self.scope.begin_look_up(num_computed)

    def begin_wait(self, wait: Wait) -> None:
        """Wait until ``wait`` is over."""
        self._enter(Phase.WAITING)
        self.wait = wait

    def begin_load(self, keys: Collection[bytes], now_s: float) -> dict[bytes, int]:
        """Begin to load blocks that its last look-up found.

        Returns those of them that are read directly, with their positions among all.
        """
        self._enter(Phase.LOADING)
        self.since_s = now_s - self.lookup.waited_s
        if not self.ways:
            return {}
        stored, met = BlockState.STORAGE, self.lookup.met
        direct = {key for key, way in self.ways.items() if way is Way.DIRECT}
        read = {key: at for at, key in enumerate(keys) if key in direct and met.get(key) is stored}
        for key in direct.union(key for key in keys if self.ways.get(key) is Way.READ):
            del self.ways[key]
        self.ways.update(dict.fromkeys(read, Way.READ))
        return read

    def end_load(self) -> float | None:
        """End its load, and return when it began to wait for it; None for a forgotten load."""
        if self.phase not in (Phase.LOADING, Phase.FINISHED):
            return None
        since_s, self.since_s, self.lookup.waited_s = self.since_s, None, 0.0
        if self.phase is Phase.LOADING:
            self._enter(Phase.LOOKING_UP)
        return since_s

    def reset(self, has_new_weights: bool) -> None:
        """Forget all copies and waits. has_new_weights: whether nothing of it may be kept."""
        if has_new_weights:
            self.scope.doubts |= Doubt.WEIGHTS
        if self.phase in (Phase.WAITING, Phase.LOADING):
            self._enter(Phase.LOOKING_UP)
        self.since_s, self.limit = None, ALL
        self.ways.clear()

    def finish(self) -> None:
        """Note its end. Its load may end later."""
        if self.phase is not Phase.LOADING:
            self.since_s = None
        self._enter(Phase.FINISHED)

    def _enter(self, phase: Phase) -> None:
        """Change the phase, which ends the wait for blocks, or forgets the load.

        A change that is not legal is a mistake of kvtier's. It raises in tests. An engine goes on,
        since a mistake here must not fail requests.
        """
        if phase not in LEGAL[self.phase]:
            mistake = f"from {self.phase.value} to {phase.value} is no change of phase"
            assert not self.is_strict, mistake
            logger.error("%s request=%s", mistake, printable(self.request.request_id))
        if self.phase is Phase.LOADING and phase is Phase.LOOKING_UP:
            self.since_s = None
        self.phase, self.wait = phase, None

    # -- its last look-up --------------------------------------------------------------------------

    def ends(self) -> dict[bytes, int]:
        """Return the token at which each block found by the last look-up ends."""
        end_of, nowhere = self.request.ends.get, BlockState.NOWHERE
        return {key: end_of(key, 0) for key, at in self.lookup.met.items() if at is not nowhere}

    def num_ready(self, keys: Iterable[bytes]) -> int:
        """Return how many of the first of ``keys`` can be loaded at once."""
        num, memory, met, ways = 0, BlockState.MEMORY, self.lookup.met, self.ways
        for key in keys:
            if met[key] is not memory and ways.get(key) is not Way.DIRECT:
                break
            num += 1
        return num

    def to_promote(self) -> list[bytes]:
        """Return the blocks of the last look-up that have to come from storage to memory."""
        met, stored = self.lookup.met.items(), BlockState.STORAGE
        return [key for key, at in met if at is stored and self.ways.get(key) is not Way.DIRECT]

    # -- its blocks --------------------------------------------------------------------------------

    def is_kept(self, key: bytes) -> bool:
        """Whether a block may be kept at all."""
        return self.scope.is_open and self._ends_within(key, self.scope.kept)

    def is_shared(self, key: bytes) -> bool:
        """Whether a block may go to storage, and come from there."""
        return self._ends_within(key, self.scope.shared)

    def _ends_within(self, key: bytes, limit: int) -> bool:
        """Whether a block ends at a token or before. One of unknown place ends beyond any."""
        return limit == ALL or self.request.ends.get(key, ALL) <= limit


class Advice(Enum):
    """Advice for a request whose look-up ended without an answer."""

    WAIT = "wait"
    LOOK_AGAIN = "look again"
    COMPUTE = "compute"
