"""The flat index of the native core: a call per prompt, and no Python object per block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from kvtier._hot import KeyIndex as Core
from kvtier.hints import Said
from kvtier.index.block_index import check_time
from kvtier.index.key_index import KeyedBlock, KeyIndex, KeyMatches
from kvtier.index.policies.replayed import RUNS
from kvtier.index.residency import State
from kvtier.types import AnyColumn, BlockId, Slot


class NativeKeyIndex(KeyIndex):
    """Blocks in rows of the native core."""

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        learning: Collection[str] = (),
        policy: str = RUNS,
        group_bytes: int = 0,
    ) -> None:
        assert Core is not None, "the native core is not there"
        super().__init__(tiers, namespace, learning, policy, group_bytes)
        self._core = Core(self.tiers, tuple(State), self.learning, policy, group_bytes)

    # -- queries ----------------------------------------------------------------------------------

    def find_all(self, keys: Sequence[bytes]) -> KeyMatches:
        return KeyMatches(*self._core.find(keys))  # type: ignore[arg-type]

    def state(self, block: BlockId, column: AnyColumn) -> State:
        return self.states_of((block,), column)[0]

    def states_of(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[State]:
        return cast("list[State]", self._core.states_of(blocks, column))

    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.slots(blocks, column))

    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        return self._core.keys(blocks)

    def num_uses(self, block: BlockId) -> int:
        return self._core.num_uses(block)

    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        return self._core.num_leases(block, column)

    def depth(self, block: BlockId) -> int:
        return self._core.depth(block)

    def num_evictable(self, column: AnyColumn) -> int:
        return self._core.num_evictable(column)

    def num_held(self, column: AnyColumn) -> int:
        return self._core.num_held(column)

    @property
    def num_bytes(self) -> int:
        """Memory of rows and look-up table, free places included."""
        return self._core.num_bytes()

    def __len__(self) -> int:
        return len(self._core)

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, num_blocks: int) -> None:
        self._core.expect(num_blocks)

    def make(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.make(keys))

    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        self._core.set_depths(blocks, depths)

    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        self._core.begin_write((block,), column, (slot,))

    def begin_write_all(
        self, blocks: Iterable[BlockId], column: AnyColumn, slots: Iterable[Slot]
    ) -> None:
        self._core.begin_write(blocks, column, slots)

    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        self.commit_all((block,), column, now)

    def commit_all(self, blocks: Iterable[BlockId], column: AnyColumn, now: float) -> None:
        check_time(now)
        self._core.commit(blocks, column)

    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.abort_all((block,), column)[0]

    def abort_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.abort(blocks, column))

    # -- requests ---------------------------------------------------------------------------------

    def asked(self, keys: Iterable[bytes], now: float) -> None:
        self._core.asked(dict.fromkeys(keys), now)

    def retain(self, keys: Iterable[bytes], said: Said, now: float) -> None:
        self._core.retain(dict.fromkeys(keys), said, now)

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        self._core.continues(keys, before)

    def admit_keys(
        self, keys: Sequence[bytes], column: AnyColumn, num_free: int, least_chance: float = 0.0
    ) -> list[bytes]:
        return [keys[at] for at in self._core.admit(keys, column, num_free, least_chance)]

    def set_doubling(self, at_blocks: float) -> None:
        self._core.set_doubling(at_blocks)

    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        self._core.set_room(column, num_blocks)

    # -- use --------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        check_time(now)
        self._core.touch(blocks)

    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._core.lease(blocks, column)

    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        self._core.release(blocks, column)

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, column: AnyColumn, num_blocks: int) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.evict(column, num_blocks))

    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        return self.forget_all((block,), column)[0]

    def forget_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        return cast("Sequence[Slot]", self._core.forget(blocks, column))

    def keep(self, block: BlockId, column: AnyColumn) -> None:
        self._core.keep((block,), column)

    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        return cast("Slot | None", self._core.lose(block, column))

    # -- for tests and doctors --------------------------------------------------------------------

    def known(self) -> list[KeyedBlock]:
        return [
            KeyedBlock(BlockId(block), key, num_uses, depth, tuple(places))  # type: ignore[arg-type]
            for block, key, num_uses, depth, places in self._core.dump()
        ]

    def order(self, column: AnyColumn) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self._core.order(column))

    def describe(self) -> str:
        return f"native, by key, {self.policies}"

    def check_invariants(self) -> None:
        self._core.check_invariants()
