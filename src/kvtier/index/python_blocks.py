"""States, slots, leases and counts of blocks in Python, for both Python indexes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvtier.core.types import BlockId, Slot
from kvtier.index.block_index import BlockIndex, check_slot, check_time
from kvtier.index.residency import Residency, State

MAX_LEASES = 0xFFFF


class IndexedBlock(Protocol):
    """Block in an index: its residency in each tier, and its number of uses."""

    @property
    def block(self) -> BlockId: ...
    @property
    def residencies(self) -> tuple[Residency, ...]: ...
    @property
    def num_uses(self) -> int: ...


class PythonBlocks(BlockIndex):
    """Index that keeps blocks as Python objects.

    A derived class finds them, and orders them for eviction.

    tiers: names of the tiers, fastest first.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = tuple(tiers)
        self._num_held = [0] * len(self.tiers)
        self._num_idle = [0] * len(self.tiers)  # ready, and not leased

    # -- for derived classes ----------------------------------------------------------------------

    @abstractmethod
    def _find(self, block: BlockId) -> IndexedBlock | None:
        """Return a block; None if it is unknown."""

    @abstractmethod
    def _entries(self) -> Iterable[IndexedBlock]:
        """Return all blocks."""

    @abstractmethod
    def _used(self, block: BlockId, position: int, now: float) -> None:
        """Note a use of a block in the tier at ``position``."""

    @abstractmethod
    def _review(self, block: BlockId, position: int) -> None:
        """Note that it may have changed whether the block can be evicted."""

    def _arrived(self, block: BlockId, position: int) -> None:
        """Note that a block is written, or ready again after an eviction was cancelled."""

    def _leaves(self, block: BlockId, position: int) -> None:
        """Note that a ready block is being evicted."""

    @abstractmethod
    def _left(self, block: BlockId, position: int, before: State) -> None:
        """Note that a tier has a block no longer. before: its state there until now."""

    # -- queries ----------------------------------------------------------------------------------

    def _position(self, tier: str) -> int:
        if tier not in self.tiers:
            raise KeyError(f"no tier {tier!r}; known tiers: {self.tiers!r}")
        return self.tiers.index(tier)

    def _entry(self, block: BlockId) -> IndexedBlock:
        entry = self._find(block)
        if entry is None:
            raise KeyError(block)
        return entry

    def _residency(self, block: BlockId, tier: str) -> Residency:
        return self._entry(block).residencies[self._position(tier)]

    def state(self, block: BlockId, tier: str) -> State:
        position, entry = self._position(tier), self._find(block)
        return State.ABSENT if entry is None else entry.residencies[position].state

    def slots(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return [self._residency(block, tier).slot for block in blocks]

    def num_uses(self, blocks: Iterable[BlockId]) -> list[int]:
        return [self._entry(block).num_uses for block in blocks]

    def num_leases(self, block: BlockId, tier: str) -> int:
        return self._residency(block, tier).leases

    def num_evictable(self, tier: str) -> int:
        return self._num_idle[self._position(tier)]

    def num_held(self, tier: str) -> int:
        return self._num_held[self._position(tier)]

    # -- changes ----------------------------------------------------------------------------------

    def begin_write(self, blocks: Iterable[BlockId], tier: str, slots: Iterable[Slot]) -> None:
        position = self._position(tier)
        for block, slot in zip(blocks, slots, strict=True):
            check_slot(slot)
            residency = self._residency(block, tier)
            residency.move(State.WRITING)
            residency.slot, residency.was_used = slot, False
            self._num_held[position] += 1
            self._arrived(block, position)

    def commit(self, blocks: Iterable[BlockId], tier: str, now: float) -> None:
        check_time(now)
        position = self._position(tier)
        for block in blocks:
            residency = self._residency(block, tier)
            residency.move(State.READY)
            self._num_idle[position] += residency.leases == 0
            if not residency.was_used:
                self._used(block, position, now)
            self._review(block, position)

    def abort(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return [self._remove(block, tier) for block in blocks]

    def lease(self, blocks: Iterable[BlockId], tier: str) -> None:
        for block in blocks:
            residency, position = self._residency(block, tier), self._position(tier)
            assert residency.state in (State.READY, State.WRITING), f"lease on {residency}"
            assert residency.leases < MAX_LEASES, "a block is leased 65,535 times"
            residency.leases += 1
            if residency.leases == 1:
                self._num_idle[position] -= residency.state is State.READY
                self._review(block, position)

    def release(self, blocks: Iterable[BlockId], tier: str) -> None:
        for block in blocks:
            residency, position = self._residency(block, tier), self._position(tier)
            assert residency.leases > 0, "released more often than leased"
            residency.leases -= 1
            if residency.leases == 0:
                self._num_idle[position] += residency.state is State.READY
                self._review(block, position)

    def _evict(self, block: BlockId, position: int) -> None:
        self._entry(block).residencies[position].move(State.EVICTING)
        self._num_idle[position] -= 1
        self._leaves(block, position)

    def forget(self, blocks: Iterable[BlockId], tier: str) -> list[Slot]:
        return [self._remove(block, tier) for block in blocks]

    def keep(self, blocks: Iterable[BlockId], tier: str) -> None:
        position = self._position(tier)
        for block in blocks:
            residency = self._residency(block, tier)
            assert residency.state is State.EVICTING, "only what is being evicted may be kept"
            residency.move(State.READY)
            self._num_idle[position] += 1
            self._arrived(block, position)
            self._review(block, position)

    def lose(self, block: BlockId, tier: str) -> Slot | None:
        if self._residency(block, tier).leases:
            return None
        self._evict(block, self._position(tier))
        return self._remove(block, tier)

    def _remove(self, block: BlockId, tier: str) -> Slot:
        residency, position = self._residency(block, tier), self._position(tier)
        before = residency.state
        residency.move(State.ABSENT)
        slot, residency.slot = residency.slot, Slot(-1)
        self._num_held[position] -= 1
        self._num_idle[position] -= before is State.READY
        self._left(block, position, before)
        return slot

    def check_invariants(self) -> None:
        for position, tier in enumerate(self.tiers):
            places = [entry.residencies[position] for entry in self._entries()]
            held = [at for at in places if at.state is not State.ABSENT]
            num_idle = sum(at.state is State.READY and at.leases == 0 for at in held)
            assert all(at.leases >= 0 for at in places), f"{tier}: leases below zero"
            assert len({at.slot for at in held}) == len(held), f"{tier}: two blocks share a slot"
            assert len(held) == self._num_held[position], f"{tier}: blocks miscounted"
            assert num_idle == self._num_idle[position], f"{tier}: idle blocks miscounted"
            absent = (at for at in places if at.state is State.ABSENT)
            assert not any(at.leases for at in absent), f"{tier}: an absent block is leased"
