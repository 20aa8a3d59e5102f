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
from enum import Enum, Flag, auto
from typing import ClassVar

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.shared.adapters import AdapterLoad
from kvtier.connectors.vllm.shared.key_scope import ALL, EVERYWHERE, NOWHERE, KeyScope
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


class Doubt(Flag):
    """Reasons not to keep what was computed for a request."""

    NONE = 0
    WEIGHTS = auto()
    """The device may have KV of it of earlier weights."""
    PAGES = auto()
    """Pages that its blocks were copied from may have been wrong."""


@dataclass(slots=True)
class Keeping:
    """Decides which of a request's blocks may be kept, and where.

    Attributes:
        scope: tiers that may keep its blocks.
        adapter: that it is computed with.
        doubts: reasons not to keep what was computed.
    """

    scope: KeyScope = EVERYWHERE
    adapter: AdapterLoad | None = None
    doubts: Doubt = Doubt.NONE

    def begin_look_up(self, num_computed: int) -> None:
        """Note that vLLM has found ``num_computed`` tokens in its own pool."""
        if self.adapter is not None and not self.adapter.keeps(num_computed):
            self.scope = NOWHERE

    def is_computed_right(self) -> bool:
        """Whether KV is of the tokens and the adapter that its keys name, and of one model."""
        if self.adapter is not None and not self.adapter.holds():
            self.scope = NOWHERE
        return self.scope is not NOWHERE and not self.doubts


@dataclass(slots=True)
class LookUp:
    """A look-up of a request's blocks.

    Attributes:
        num_computed: tokens that the device had.
        found: state of each block behind these tokens; None before vLLM's first query.
        answers: look-ups in stores that are worth waiting for.
        met: states of the blocks that vLLM has queried, in that order.
        declined: blocks in memory that are recomputed, because loading would take longer.
    """

    num_computed: int = 0
    found: dict[bytes, BlockState] | None = None
    answers: Sequence[Awaited] = ()
    met: dict[bytes, BlockState] = field(default_factory=dict)
    declined: int = 0


@dataclass(slots=True)
class Patience:
    """Time that a request has waited for its blocks, and what it waits for.

    Attributes:
        since_s: when it began to wait; None if it does not.
        waited_s: how long it has waited, when the wait was over.
        given_up: why it waits no more, and takes only what is ready.
        wait: what it waits for in the phase ``WAITING``.
    """

    since_s: float | None = None
    waited_s: float = 0.0
    given_up: GivenUp | None = None
    wait: Wait | None = None


@dataclass(slots=True)
class Limit:
    """No block that ends beyond token ``end`` is loaded. declined: blocks that were found there."""

    end: int
    declined: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestState:
    """State of one request. Its phase is changed by its methods only."""

    is_strict: ClassVar[bool] = False
    """Whether a change of phase that is not legal raises. Tests switch it on."""

    request: RequestBlocks
    """Its blocks, and what its client asked for."""
    keeping: Keeping = field(default_factory=Keeping)
    """Decides which blocks may be kept."""
    phase: Phase = Phase.NEW
    """Phase between arrival and end."""
    lookup: LookUp = field(default_factory=LookUp)
    """Its last look-up."""
    patience: Patience = field(default_factory=Patience)
    """Time that was spent waiting, and the reason to wait no more."""
    ways: dict[bytes, Way] = field(default_factory=dict)
    """Way of each block in storage to the device."""
    limit: Limit | None = None
    """The token behind which nothing is loaded; None for no limit."""
    load_since_s: float | None = None
    """When it began to wait for the load in the phase ``LOADING``; None for a forgotten load."""
    used_keys: dict[bytes, None] = field(default_factory=dict)
    """Blocks that were loaded or stored for it."""
    last_key: bytes | None = None
    """The last block that the eviction policy knows of; None before it knows of any."""

    # -- phases ------------------------------------------------------------------------------------

    def begin_look_up(self, num_computed: int) -> None:
        """Begin a look-up of its blocks behind so many tokens, which the device has."""
        self._enter(Phase.LOOKING_UP)
        self.patience.wait = self.load_since_s = None
        self.lookup = LookUp(num_computed)
        self.keeping.begin_look_up(num_computed)

    def begin_wait(self, wait: Wait) -> None:
        """Wait until ``wait`` is over."""
        self._enter(Phase.WAITING)
        self.patience.wait = wait

    def end_wait(self) -> None:
        """End the wait: it is looked up next."""
        self._enter(Phase.LOOKING_UP)
        self.patience.wait = None

    def begin_load(self, keys: Collection[bytes], now_s: float) -> dict[bytes, int]:
        """Begin to load blocks that its last look-up found.

        Returns those of them that are read directly, with their positions among all.
        """
        self._enter(Phase.LOADING)
        self.load_since_s = now_s - self.patience.waited_s
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
        since_s, self.load_since_s = self.load_since_s, None
        if since_s is not None:
            self.patience.waited_s = 0.0
        if self.phase is Phase.LOADING:
            self._enter(Phase.LOOKING_UP)
        return since_s

    def reset(self, has_new_weights: bool) -> None:
        """Forget all copies and waits. has_new_weights: whether nothing of it may be kept."""
        if has_new_weights:
            self.keeping.doubts |= Doubt.WEIGHTS
        if self.phase in (Phase.WAITING, Phase.LOADING):
            self._enter(Phase.LOOKING_UP)
        self.patience.wait = self.limit = self.load_since_s = None
        self.ways.clear()
        self.used_keys.clear()

    def finish(self) -> None:
        """Note its end. Its load may end later."""
        self._enter(Phase.FINISHED)
        self.patience.wait = None

    def _enter(self, phase: Phase) -> None:
        """Change the phase. A change that is not legal is a mistake of kvtier's.

        It raises in tests. An engine goes on, since a mistake here must not fail requests.
        """
        if phase not in LEGAL[self.phase]:
            mistake = f"from {self.phase.value} to {phase.value} is no change of phase"
            assert not self.is_strict, mistake
            logger.error("%s request=%s", mistake, printable(self.request.request_id))
        self.phase = phase

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

    def is_ready(self, keys: Collection[bytes]) -> bool:
        """Whether all of ``keys`` can be loaded at once."""
        return self.num_ready(keys) == len(keys)

    def to_promote(self) -> list[bytes]:
        """Return the blocks of the last look-up that have to come from storage to memory."""
        met, stored = self.lookup.met.items(), BlockState.STORAGE
        return [key for key, at in met if at is stored and self.ways.get(key) is not Way.DIRECT]

    # -- its blocks --------------------------------------------------------------------------------

    def is_kept(self, key: bytes) -> bool:
        """Whether a block may be kept at all."""
        if self.keeping.doubts & Doubt.WEIGHTS:
            return False
        kept = self.keeping.scope.kept
        return kept == ALL or self._end(key) <= kept

    def is_shared(self, key: bytes) -> bool:
        """Whether a block may go to storage, and come from there."""
        shared = self.keeping.scope.shared
        return shared == ALL or self._end(key) <= shared

    def _end(self, key: bytes) -> int:
        """Return the token at which a block ends. One of unknown place ends beyond any limit."""
        return self.request.ends.get(key, ALL)

    def in_prompt_order(self) -> list[bytes]:
        """Return all blocks of the request, including blocks that the device had itself."""
        keys = self.request.in_order()
        return keys if self.used_keys.keys() <= set(keys) else list(self.used_keys)


class Advice(Enum):
    """Advice for a request whose look-up ended without an answer."""

    WAIT = "wait"
    LOOK_AGAIN = "look again"
    COMPUTE = "compute"
