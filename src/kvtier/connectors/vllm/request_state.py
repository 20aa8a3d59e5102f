"""A request on the scheduler's side, from its first look-up to its end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.connectors.vllm.adapters import AdapterLoad
from kvtier.connectors.vllm.key_scope import ALL, EVERYWHERE, NOWHERE, KeyScope
from kvtier.connectors.vllm.prompt import RequestBlocks
from kvtier.keyed.block_cache import BlockState
from kvtier.plan.decide import Awaited, Wait


@dataclass(slots=True)
class RequestState:
    """State of one request.

    request: its blocks. num_computed: tokens that it had at its last look-up. found: where its
    blocks are, all of those behind these tokens; None before the first is asked for. asked: what
    stores were asked about them. wait: what it waits for, if it does.

    places: of the blocks that its last look-up met, in that look-up's order. promoted: blocks that
    were brought from storage for it. limit: no block that ends beyond this token is loaded.
    direct: blocks on disk that are to be read directly to the device. read: those that were, until
    they are loaded from memory.
    waits_since: when it began to wait. is_impatient: it takes what is ready, and waits for nothing
    more. scope: which of its blocks may be kept, and where. adapter: that it is computed with.
    is_stale: the device may have KV of it
    of earlier weights, so that nothing of it is kept. used: blocks that were loaded or stored for
    it. is_explained: the log has what was decided for
    it. last_asked: the last block that the policy was told of, None before it was of any.

    declined_ahead, declined: how many were there and are computed all the same: that were not
    brought to memory, and of those in memory, by the last word on it.
    waited_s: what it has waited for blocks to come to memory, in all. loading: the tokens that are
    being loaded for it, from one up to another, and since when.
    """

    request: RequestBlocks
    num_computed: int = 0
    found: dict[bytes, BlockState] | None = None
    asked: Sequence[Awaited] = ()
    wait: Wait | None = None
    places: dict[bytes, BlockState] = field(default_factory=dict)
    promoted: set[bytes] = field(default_factory=set)
    direct: set[bytes] = field(default_factory=set)
    read: set[bytes] = field(default_factory=set)
    limit: int | None = None
    waits_since: float | None = None
    is_impatient: bool = False
    scope: KeyScope = EVERYWHERE
    adapter: AdapterLoad | None = None
    is_stale: bool = False
    is_explained: bool = False
    used: dict[bytes, None] = field(default_factory=dict)
    declined_ahead: int = 0
    declined: int = 0
    waited_s: float = 0.0
    loading: tuple[int, int, float] | None = None
    last_asked: bytes | None = None
    is_doubted: bool = False
    """Whether pages that its blocks were copied from may have been wrong."""

    def begin_look_up(self, num_computed: int) -> None:
        """The request is about to ask for its blocks, those after so many tokens."""
        self.places.clear()
        self.found, self.num_computed = None, num_computed
        if self.adapter is not None and not self.adapter.keeps(num_computed):
            self.scope = NOWHERE

    def ends(self) -> dict[bytes, int]:
        """Return the token at which each block found by the last look-up ends."""
        end_of, nowhere = self.request.ends.get, BlockState.NOWHERE
        return {key: end_of(key, 0) for key, at in self.places.items() if at is not nowhere}

    def num_ready(self, keys: Iterable[bytes]) -> int:
        """Return how many of the first of ``keys`` can be loaded at once."""
        num, memory, places, direct = 0, BlockState.MEMORY, self.places, self.direct
        for key in keys:
            if places[key] is not memory and key not in direct:
                break
            num += 1
        return num

    def is_ready(self, keys: Collection[bytes]) -> bool:
        """Whether all of ``keys`` can be loaded at once."""
        return self.num_ready(keys) == len(keys)

    def to_bring(self) -> list[bytes]:
        """Return the blocks of the last look-up that have to come from storage to memory."""
        there = (key for key, place in self.places.items() if place is BlockState.STORAGE)
        return [key for key in there if key not in self.direct]

    def begin_load(self, keys: Collection[bytes]) -> dict[bytes, int]:
        """Blocks that its last look-up found are about to be loaded.

        Returns those of them that are read directly, with their positions among all.
        """
        read = {
            key: at
            for at, key in enumerate(keys)
            if key in self.direct and self.places.get(key) is BlockState.STORAGE
        }
        self.direct.clear()
        self.read.difference_update(keys)
        self.read.update(read)
        return read

    def is_computed_right(self) -> bool:
        """Whether its KV is of the tokens and the adapter that its keys name, and of one model."""
        if self.adapter is not None and not self.adapter.holds():
            self.scope = NOWHERE
        return self.scope is not NOWHERE and not (self.is_doubted or self.is_stale)

    def is_kept(self, key: bytes) -> bool:
        """Whether a block may be kept at all."""
        if self.is_stale:
            return False
        return self.scope.kept == ALL or self._end(key) <= self.scope.kept

    def is_shared(self, key: bytes) -> bool:
        """Whether a block may go to storage, and come from there."""
        return self.scope.shared == ALL or self._end(key) <= self.scope.shared

    def _end(self, key: bytes) -> int:
        """In tokens; of a block whose place vLLM does not tell, none is far enough."""
        return self.request.ends.get(key, ALL)

    def in_prompt_order(self) -> list[bytes]:
        """All blocks of the request, those as well that the device had itself."""
        blocks = self.request.in_order()
        return blocks if self.used.keys() <= set(blocks) else list(self.used)


class Advice(Enum):
    """To a request whose look-up ended without an answer."""

    WAIT = "wait"
    LOOK_AGAIN = "look again"
    COMPUTE = "compute"
