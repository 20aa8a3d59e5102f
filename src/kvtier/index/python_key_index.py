"""Flat index in pure Python, always with LRU: fall-back, and test oracle of the native one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvtier._hot import Numbers
from kvtier.hints import Said, check_said
from kvtier.index.block_index import check_slot, check_time
from kvtier.index.key_index import UNKNOWN, KeyedBlock, KeyIndex, KeyMatches, MissingKeys
from kvtier.index.known_blocks import KnownBlocks
from kvtier.index.policies.replayed import LRU
from kvtier.index.residency import Residency, State
from kvtier.types import NO_BLOCK, BlockId, Slot

MOST_LEASES = 0xFFFF
MOST_HASH = (1 << 63) - 1


@dataclass(slots=True)
class _TierBlocks:
    """A tier's blocks in the index.

    order: order of eviction. Blocks that an eviction has skipped are not in it.
    """

    order: OrderedDict[BlockId, None] = field(default_factory=OrderedDict)
    num_held: int = 0
    num_idle: int = 0


class PythonKeyIndex(KeyIndex):
    """Key index that keeps blocks as Python objects. because: why this index is used."""

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        because: str = "asked for",
    ) -> None:
        super().__init__(tiers, namespace, policy=LRU)
        self._because = because
        self._of_tiers = tuple(_TierBlocks() for _ in self.tiers)
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
        return [hash(key) & MOST_HASH for key in self.keys(blocks)]

    def in_slots(self, slots: Collection[Slot], tier: str) -> list[BlockId]:
        places = [(each.block, self._residency(each.block, tier)) for each in self._blocks]
        return [block for block, at in places if at.state is not State.ABSENT and at.slot in slots]

    def state(self, block: BlockId, tier: str) -> State:
        position = self._position(tier)
        known = self._blocks.get(block)
        return State.ABSENT if known is None else known.residencies[position].state

    def slots(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return [self._residency(block, tier).slot for block in blocks]

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return [self._blocks[block].key for block in blocks]

    def num_uses(self, block: BlockId) -> int:
        return self._blocks[block].num_uses

    def num_leases(self, block: BlockId, tier: str) -> int:
        return self._residency(block, tier).leases

    def depth(self, block: BlockId) -> int:
        return self._blocks[block].depth

    def num_evictable(self, tier: str) -> int:
        return self._of_tier(tier).num_idle

    def num_held(self, tier: str) -> int:
        return self._of_tier(tier).num_held

    def __len__(self) -> int:
        return len(self._blocks)

    # -- writing ----------------------------------------------------------------------------------

    def make(self, keys: Sequence[bytes]) -> list[BlockId]:
        return [self._blocks.make(key).block for key in keys]

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        for block, depth in zip(blocks, depths, strict=True):
            self._blocks[block].depth = depth

    def begin_write(self, block: BlockId, tier: str, slot: Slot) -> None:
        check_slot(slot)
        residency = self._residency(block, tier)
        residency.move(State.WRITING)
        residency.slot, residency.was_used = slot, False
        here = self._of_tier(tier)
        here.num_held += 1
        here.order[block] = None

    def commit(self, block: BlockId, tier: str, now: float) -> None:
        check_time(now)
        residency = self._residency(block, tier)
        residency.move(State.READY)
        self._of_tier(tier).num_idle += residency.leases == 0
        if not residency.was_used:
            self._used(block, tier)
        self._come_back(block, tier)

    def abort(self, block: BlockId, tier: str) -> Slot:
        return self._leave(block, tier)

    # -- requests ---------------------------------------------------------------------------------

    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        check_time(now)

    def retain(self, keys: Iterable[bytes], said: Said, now: float) -> None:
        check_time(now)
        check_said(said)

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
            for tier, residency in zip(self.tiers, known.residencies, strict=True):
                if residency.state in (State.WRITING, State.READY):
                    residency.was_used = True
                    self._used(block, tier)

    def _used(self, block: BlockId, tier: str) -> None:
        order = self._of_tier(tier).order
        order[block] = None
        order.move_to_end(block)

    def lease(self, blocks: Iterable[BlockId], tier: str) -> None:
        for block in blocks:
            residency = self._residency(block, tier)
            assert residency.state in (State.READY, State.WRITING), f"lease on {residency}"
            assert residency.leases < MOST_LEASES, "a block is leased 65,535 times"
            residency.leases += 1
            if residency.leases == 1:
                self._of_tier(tier).num_idle -= residency.state is State.READY

    def release(self, blocks: Iterable[BlockId], tier: str) -> None:
        for block in blocks:
            residency = self._residency(block, tier)
            assert residency.leases > 0, "released more often than leased"
            residency.leases -= 1
            if residency.leases == 0:
                self._of_tier(tier).num_idle += residency.state is State.READY
                self._come_back(block, tier)

    def _come_back(self, block: BlockId, tier: str) -> None:
        """Make a block that an eviction has skipped the next victim, once it is evictable.

        Blocks that were evicted meanwhile were used later than this one.
        """
        here = self._of_tier(tier)
        if not self._residency(block, tier).evictable:
            return
        if block not in here.order:
            here.order[block] = None
            here.order.move_to_end(block, last=False)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, tier: str, num_blocks: int) -> list[BlockId]:
        order = self._of_tier(tier).order
        num_blocks = min(num_blocks, self._of_tier(tier).num_idle)
        chosen: list[BlockId] = []
        while len(chosen) < num_blocks:
            block, _ = order.popitem(last=False)
            residency = self._residency(block, tier)
            if residency.evictable:
                residency.move(State.EVICTING)
                self._of_tier(tier).num_idle -= 1
                chosen.append(block)
        return chosen

    def forget(self, block: BlockId, tier: str) -> Slot:
        return self._leave(block, tier)

    def keep(self, block: BlockId, tier: str) -> None:
        residency = self._residency(block, tier)
        assert residency.state is State.EVICTING, "only what is being evicted may be kept"
        residency.move(State.READY)
        self._of_tier(tier).num_idle += 1
        self._come_back(block, tier)

    def lose(self, block: BlockId, tier: str) -> Slot | None:
        residency = self._residency(block, tier)
        if residency.leases:
            return None
        residency.move(State.EVICTING)
        self._of_tier(tier).num_idle -= 1
        return self._leave(block, tier)

    def _leave(self, block: BlockId, tier: str) -> Slot:
        known, residency = self._blocks[block], self._residency(block, tier)
        before, slot = residency.state, residency.slot
        residency.move(State.ABSENT)
        residency.slot = Slot(-1)
        here = self._of_tier(tier)
        here.num_idle -= before is State.READY
        here.num_held -= 1
        here.order.pop(block, None)
        if not known.is_cached:
            self._blocks.drop(known)
        return slot

    # -- bookkeeping ------------------------------------------------------------------------------

    def _position(self, tier: str) -> int:
        if tier not in self.tiers:
            raise KeyError(f"no tier {tier!r}; known tiers: {self.tiers!r}")
        return self.tiers.index(tier)

    def _of_tier(self, tier: str) -> _TierBlocks:
        return self._of_tiers[self._position(tier)]

    def _residency(self, block: BlockId, tier: str) -> Residency:
        return self._blocks[block].residencies[self._position(tier)]

    # -- for tests and diagnosis ------------------------------------------------------------------

    def known(self) -> list[KeyedBlock]:
        return [
            KeyedBlock(
                each.block,
                each.key,
                each.num_uses,
                each.depth,
                tuple((at.state, at.slot, at.leases) for at in each.residencies),
            )
            for each in self._blocks
        ]

    def order(self, tier: str) -> list[BlockId]:
        return list(self._of_tier(tier).order)

    def describe(self) -> str:
        return f"Python, by key, {LRU}, {self._because}"

    def check_invariants(self) -> None:
        for tier, counts in zip(self.tiers, self._of_tiers, strict=True):
            places = [(each.block, self._residency(each.block, tier)) for each in self._blocks]
            held = [at.slot for _, at in places if at.state is not State.ABSENT]
            idle = {block for block, at in places if at.evictable}
            assert len(held) == len(set(held)), f"{tier}: two blocks share a slot"
            assert len(held) == counts.num_held, f"{tier}: blocks miscounted"
            assert len(idle) == counts.num_idle, f"{tier}: idle blocks miscounted"
            assert idle <= set(self.order(tier)), (
                f"{tier}: a block that may leave is not in the order"
            )
        self._blocks.check_invariants()
