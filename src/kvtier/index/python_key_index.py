"""Flat index in pure Python, always with LRU: fall-back, and test oracle of the native one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from kvtier.core.hints import BlockHint, check_block_hint
from kvtier.core.hot import Numbers
from kvtier.core.types import NO_BLOCK, BlockId, Slot
from kvtier.index.block_index import check_time
from kvtier.index.key_index import UNKNOWN, KeyedBlock, KeyIndex, KeyMatches, MissingKeys
from kvtier.index.known_blocks import KnownBlock, KnownBlocks
from kvtier.index.policies.replayed import LRU
from kvtier.index.python_blocks import PythonBlocks
from kvtier.index.residency import State

MAX_HASH = (1 << 63) - 1


class PythonKeyIndex(PythonBlocks, KeyIndex):
    """Key index that keeps blocks as Python objects. because: why this index is used."""

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        because: str = "asked for",
    ) -> None:
        KeyIndex.__init__(self, dict.fromkeys(tiers, LRU), namespace)
        PythonBlocks.__init__(self, tiers)
        self._because = because
        # Order of eviction in each tier. Blocks that an eviction has skipped are not in it.
        self._orders: tuple[OrderedDict[BlockId, None], ...] = tuple(
            OrderedDict() for _ in self.tiers
        )
        self._blocks = KnownBlocks(len(self.tiers))

    # -- queries ----------------------------------------------------------------------------------

    def find_all(self, keys: Collection[bytes]) -> KeyMatches:
        found = [self._blocks.find(key) for key in keys]
        nowhere = bytes([UNKNOWN]) * len(self.tiers)
        states = (
            nowhere if each is None else bytes(residency.state for residency in each.residencies)
            for each in found
        )
        blocks = Numbers(NO_BLOCK if each is None else each.block for each in found)
        return KeyMatches(cast("Sequence[BlockId]", blocks), b"".join(states))

    def missing(self, keys: Collection[bytes], tier: str) -> MissingKeys:
        position = self._position(tier)
        missing: dict[bytes, None] = {}
        ready = []
        for key in keys:
            known = self._blocks.find(key)
            state = State.ABSENT if known is None else known.residencies[position].state
            if state is State.ABSENT:
                missing[key] = None
            elif known is not None and state is State.READY:
                ready.append(known.block)
        return MissingKeys(list(missing), ready)

    def hashes(self, blocks: Sequence[BlockId]) -> list[int]:
        return [hash(key) & MAX_HASH for key in self.keys(blocks)]

    def in_slots(self, slots: Collection[Slot], tier: str) -> list[BlockId]:
        places = [(block.block, self._residency(block.block, tier)) for block in self._blocks]
        return [block for block, at in places if at.state is not State.ABSENT and at.slot in slots]

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return [self._blocks[block].key for block in blocks]

    def depth(self, block: BlockId) -> int:
        return self._blocks[block].depth

    def __len__(self) -> int:
        return len(self._blocks)

    # -- writing ----------------------------------------------------------------------------------

    def make(self, keys: Sequence[bytes]) -> list[BlockId]:
        return [self._blocks.make(key).block for key in keys]

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        for block, depth in zip(blocks, depths, strict=True):
            self._blocks[block].depth = depth

    # -- requests ---------------------------------------------------------------------------------

    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        check_time(now)

    def retain(self, keys: Iterable[bytes], block_hint: BlockHint, now: float) -> None:
        check_time(now)
        check_block_hint(block_hint)

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        return

    def admit_keys(
        self, keys: Sequence[bytes], tier: str, num_free: int, least_chance: float = 0.0
    ) -> list[bytes]:
        return list(keys)

    def set_recompute_slope(self, at_blocks: float) -> None:
        return

    def set_room(self, tier: str, num_blocks: int) -> None:
        self._position(tier)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        for block in reversed(list(blocks)):
            known = self._blocks[block]
            known.num_uses += 1
            for position, residency in enumerate(known.residencies):
                if residency.is_there:
                    residency.was_used = True
                    self._used(block, position, now)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, tier: str, num_blocks: int) -> list[BlockId]:
        position = self._position(tier)
        num_blocks = min(num_blocks, self._num_idle[position])
        chosen: list[BlockId] = []
        while len(chosen) < num_blocks:
            block, _ = self._orders[position].popitem(last=False)
            if self._blocks[block].residencies[position].evictable:
                self._evict(block, position)
                chosen.append(block)
        return chosen

    # -- bookkeeping ------------------------------------------------------------------------------

    def _find(self, block: BlockId) -> KnownBlock | None:
        return self._blocks.get(block)

    def _entries(self) -> Iterable[KnownBlock]:
        return self._blocks

    def _used(self, block: BlockId, position: int, now: float) -> None:
        order = self._orders[position]
        order[block] = None
        order.move_to_end(block)

    def _review(self, block: BlockId, position: int) -> None:
        """Make a block that an eviction has skipped the next victim, once it is evictable.

        Blocks that were evicted meanwhile were used later than this one.
        """
        order = self._orders[position]
        if block not in order and self._blocks[block].residencies[position].evictable:
            order[block] = None
            order.move_to_end(block, last=False)

    def _arrived(self, block: BlockId, position: int) -> None:
        if self._blocks[block].residencies[position].state is State.WRITING:
            self._orders[position][block] = None

    def _left(self, block: BlockId, position: int, before: State) -> None:
        self._orders[position].pop(block, None)
        known = self._blocks[block]
        if not known.is_cached:
            self._blocks.drop(known)

    # -- for tests and diagnosis ------------------------------------------------------------------

    def known(self) -> list[KeyedBlock]:
        return [
            KeyedBlock(
                block.block,
                block.key,
                block.num_uses,
                block.depth,
                tuple((at.state, at.slot, at.leases) for at in block.residencies),
            )
            for block in self._blocks
        ]

    def order(self, tier: str) -> list[BlockId]:
        return list(self._orders[self._position(tier)])

    def describe(self) -> str:
        return f"Python, by key, {LRU}, {self._because}"

    def check_invariants(self) -> None:
        super().check_invariants()
        for position, order in enumerate(self._orders):
            idle = {entry.block for entry in self._blocks if entry.residencies[position].evictable}
            assert idle <= order.keys(), "a block that may be evicted is not in the order"
        self._blocks.check_invariants()
