"""The flat index in pure Python: fall-back, and oracle of the native one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from kvtier._reference.runs import Block
from kvtier.hints import Said, check_said
from kvtier.index.block_index import check_slot, check_time
from kvtier.index.key_index import UNKNOWN, Found, KeyedBlock, KeyIndex
from kvtier.index.known_blocks import KnownBlocks
from kvtier.index.learned_column import LearnedColumn
from kvtier.index.policies.replayed import RUNS
from kvtier.index.residency import Residency, State
from kvtier.types import AnyColumn, BlockId, Slot

MOST_LEASES = 0xFFFF


@dataclass(slots=True)
class _Column:
    """order: of leaving; what an eviction has passed over is not in it. learning: in its place,
    where a policy is told of requests."""

    order: OrderedDict[BlockId, None] = field(default_factory=OrderedDict)
    num_held: int = 0
    num_idle: int = 0
    learning: LearnedColumn | None = None


class PythonKeyIndex(KeyIndex):
    """Blocks as Python objects. because: why this index is used."""

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        learning: Collection[str] = (),
        policy: str = RUNS,
        group_bytes: int = 0,
        because: str = "asked for",
    ) -> None:
        super().__init__(tiers, namespace, learning, policy, group_bytes)
        self._because = because
        self._columns = tuple(_Column() for _ in self.tiers)
        self._blocks = KnownBlocks(len(self.tiers), group_bytes)
        for at, tier in enumerate(self.tiers):
            if tier in self.learning:
                self._columns[at].learning = LearnedColumn(self._blocks, at, policy)

    # -- queries ----------------------------------------------------------------------------------

    def find_all(self, keys: Sequence[bytes]) -> Found:
        found = [self._blocks.find(key) for key in keys]
        nowhere = bytes([UNKNOWN]) * len(self.tiers)
        states = (
            nowhere if each is None else bytes(residency.state for residency in each.residencies)
            for each in found
        )
        return Found([None if each is None else each.block for each in found], b"".join(states))

    def state(self, block: BlockId, column: AnyColumn) -> State:
        position = self._position(column)
        known = self._blocks.get(block)
        return State.ABSENT if known is None else known.residencies[position].state

    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[Slot]:
        return [self._residency(block, column).slot for block in blocks]

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return [self._blocks[block].key for block in blocks]

    def num_uses(self, block: BlockId) -> int:
        return self._blocks[block].num_uses

    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        return self._residency(block, column).leases

    def depth(self, block: BlockId) -> int:
        return self._blocks[block].depth

    def num_evictable(self, column: AnyColumn) -> int:
        return self._column(column).num_idle

    def num_held(self, column: AnyColumn) -> int:
        return self._column(column).num_held

    def __len__(self) -> int:
        return len(self._blocks)

    # -- writing ----------------------------------------------------------------------------------

    def make(self, keys: Sequence[bytes]) -> list[BlockId]:
        return [self._blocks.make(key).block for key in keys]

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        for block, depth in zip(blocks, depths, strict=True):
            self._blocks[block].depth = depth

    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        check_slot(slot)
        residency = self._residency(block, column)
        residency.move(State.WRITING)
        residency.slot, residency.was_used = slot, False
        here = self._column(column)
        here.num_held += 1
        if here.learning is not None:
            self._enter(block, here.learning)
        else:
            here.order[block] = None

    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        check_time(now)
        residency = self._residency(block, column)
        residency.move(State.READY)
        self._column(column).num_idle += residency.leases == 0
        if not residency.was_used:
            self._used(block, column)
        self._come_back(block, column)

    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        return self._leave(block, column)

    # -- requests ---------------------------------------------------------------------------------

    def asked(self, keys: Iterable[bytes], now: float) -> None:
        check_time(now)
        for learning, path, found in self._prompt(keys):
            learning.asked(path, found, now)

    def retain(self, keys: Iterable[bytes], said: Said, now: float) -> None:
        check_time(now)
        check_said(said)
        for learning, path, found in self._prompt(keys):
            learning.live.retain(path, found, said, now)

    @property
    def _learning(self) -> Iterator[LearnedColumn]:
        for column in self._columns:
            if column.learning is not None:
                yield column.learning

    def _names(self, keys: Iterable[bytes]) -> list[int]:
        """By place, in order."""
        return [name for name, _ in groupby(keys, self._blocks.name)]

    def _prompt(
        self, keys: Iterable[bytes]
    ) -> Iterator[tuple[LearnedColumn, list[int], list[Block]]]:
        names = self._names(dict.fromkeys(keys))
        for learning in self._learning:
            found = takewhile(lambda block: block is not None, map(learning.named, names))
            yield learning, names, [block for block in found if block]

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        names = self._names(keys)
        for learning in self._learning:
            learning.live.continues(names, self._blocks.name(before))

    def admit_keys(
        self, keys: Sequence[bytes], column: AnyColumn, num_free: int, least_chance: float = 0.0
    ) -> list[bytes]:
        learning = self._column(column).learning
        if learning is None:
            return list(keys)
        names = list(map(self._blocks.name, keys))
        return [keys[at] for at in learning.admit(names, max(0, num_free), least_chance)]

    def set_doubling(self, at_blocks: float) -> None:
        for learning in self._learning:
            learning.live.set_doubling(at_blocks)

    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        learning = self._column(column).learning
        if learning is not None:
            learning.set_room(num_blocks)

    def _enter(self, block: BlockId, here: LearnedColumn) -> None:
        """Give a key without a requested position the predecessor it has in other columns."""
        known = self._blocks[block]
        behind: Block | None = None
        for other in self._learning:
            in_front = other.in_front_of(known) if other is not here else None
            if behind is None and in_front is not None:
                behind = here.named(in_front)
        here.enter(known, behind)

    def _evict_learned(
        self, learning: LearnedColumn, column: AnyColumn, num_blocks: int
    ) -> list[BlockId]:
        chosen: list[BlockId] = []
        learning.live.begin_evicting()
        while len(chosen) < num_blocks and (left := learning.evict()):
            for block in left:
                self._residency(block, column).move(State.EVICTING)
            self._column(column).num_idle -= len(left)
            chosen += left
        return chosen

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

    def _used(self, block: BlockId, column: AnyColumn) -> None:
        order = self._column(column).order
        if self._column(column).learning is not None:
            return
        order[block] = None
        order.move_to_end(block)

    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        for block in blocks:
            residency = self._residency(block, column)
            assert residency.state in (State.READY, State.WRITING), f"lease on {residency}"
            assert residency.leases < MOST_LEASES, "a block is leased 65,535 times"
            residency.leases += 1
            if residency.leases == 1:
                self._column(column).num_idle -= residency.state is State.READY

    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        for block in blocks:
            residency = self._residency(block, column)
            assert residency.leases > 0, "released more often than leased"
            residency.leases -= 1
            if residency.leases == 0:
                self._column(column).num_idle += residency.state is State.READY
                self._come_back(block, column)

    def _come_back(self, block: BlockId, column: AnyColumn) -> None:
        """A block that was passed over leaves next: those that left meanwhile were used after
        it."""
        here = self._column(column)
        if not self._residency(block, column).evictable:
            return
        if here.learning is not None:
            here.learning.let_go(self._blocks[block])
        elif block not in here.order:
            here.order[block] = None
            here.order.move_to_end(block, last=False)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, column: AnyColumn, num_blocks: int) -> list[BlockId]:
        order = self._column(column).order
        num_blocks = min(num_blocks, self._column(column).num_idle)
        learning = self._column(column).learning
        if learning is not None:
            return self._evict_learned(learning, column, num_blocks)
        chosen: list[BlockId] = []
        while len(chosen) < num_blocks:
            block, _ = order.popitem(last=False)
            residency = self._residency(block, column)
            if residency.evictable:
                residency.move(State.EVICTING)
                self._column(column).num_idle -= 1
                chosen.append(block)
        return chosen

    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        return self._leave(block, column)

    def keep(self, block: BlockId, column: AnyColumn) -> None:
        residency = self._residency(block, column)
        assert residency.state is State.EVICTING, "only what is being evicted may be kept"
        residency.move(State.READY)
        here = self._column(column)
        here.num_idle += 1
        if here.learning is not None:
            self._enter(block, here.learning)
        self._come_back(block, column)

    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        residency = self._residency(block, column)
        if residency.leases:
            return None
        residency.move(State.EVICTING)
        self._column(column).num_idle -= 1
        return self._leave(block, column)

    def _leave(self, block: BlockId, column: AnyColumn) -> Slot:
        known, residency = self._blocks[block], self._residency(block, column)
        before, slot = residency.state, residency.slot
        residency.move(State.ABSENT)
        residency.slot = Slot(-1)
        here = self._column(column)
        here.num_idle -= before is State.READY
        here.num_held -= 1
        here.order.pop(block, None)
        if here.learning is not None:
            here.learning.leave(known)
        if not known.is_cached:
            self._blocks.drop(known)
        return slot

    # -- bookkeeping ------------------------------------------------------------------------------

    def _position(self, column: AnyColumn) -> int:
        tier, group = (column, 0) if isinstance(column, str) else column
        if tier not in self.tiers or group:
            raise KeyError(f"no column {column!r}; known tiers: {self.tiers!r}")
        return self.tiers.index(tier)

    def _column(self, column: AnyColumn) -> _Column:
        return self._columns[self._position(column)]

    def _residency(self, block: BlockId, column: AnyColumn) -> Residency:
        return self._blocks[block].residencies[self._position(column)]

    # -- for tests and doctors --------------------------------------------------------------------

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

    def order(self, column: AnyColumn) -> list[BlockId]:
        here = self._column(column)
        if here.learning is not None:
            return sorted(here.learning.blocks, key=lambda block: block & 0xFFFFFFFF)
        return list(here.order)

    def describe(self) -> str:
        return f"Python, by key, {self.policies}, {self._because}"

    def check_invariants(self) -> None:
        for tier, column in zip(self.tiers, self._columns, strict=True):
            places = [(each.block, self._residency(each.block, tier)) for each in self._blocks]
            held = [at.slot for _, at in places if at.state is not State.ABSENT]
            idle = {block for block, at in places if at.evictable}
            assert len(held) == len(set(held)), f"{tier}: two blocks share a slot"
            assert len(held) == column.num_held, f"{tier}: blocks miscounted"
            assert len(idle) == column.num_idle, f"{tier}: idle blocks miscounted"
            assert idle <= set(self.order(tier)), (
                f"{tier}: a block that may leave is not in the order"
            )
            if column.learning is not None:
                column.learning.check_invariants()
        self._blocks.check_invariants()
