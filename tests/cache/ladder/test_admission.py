"""Admission to host memory and storage, by the policies of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from kvtier.cache.ladder.admission import Admission, TransientBlocks
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.write_queues import LEAST_CHANCE, SCARCE_SHARE, WriteQueue, WriteQueues
from kvtier.core.types import DEVICE, DISK, HOST, BlockId
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.plan import WriteBudget
from kvtier.tiers import Quota, StorageFacts

BLOCKS = [BlockId(number) for number in range(4)]


class Judges:
    """An index that admits the blocks in ``lets_in``. chances: chance of reuse of each block."""

    def __init__(
        self,
        lets_in: Mapping[str, Collection[int]],
        on_disk: Collection[int] = (),
        chances: Sequence[float] = (1.0,) * 4,
    ) -> None:
        self.lets_in = lets_in
        self.on_disk = on_disk
        self.chances = chances

    def admit(
        self, blocks: Sequence[BlockId], tier: str, num_free: int, least_chance: float
    ) -> Sequence[BlockId]:
        return [
            block
            for block in blocks
            if block in self.lets_in[tier] and self.chances[block] >= least_chance
        ]

    def states_of(self, blocks: Sequence[BlockId], tier: str) -> list[State]:
        assert tier == DISK
        return [State.READY if block in self.on_disk else State.ABSENT for block in blocks]


class Noted:
    """Records the blocks noted as transient."""

    def note(self, blocks: Collection[BlockId], passing: Collection[BlockId]) -> None:
        assert set(passing) <= set(blocks)


@dataclass(frozen=True)
class Chance:
    """Write queues that require the same chance of reuse of every block."""

    is_open: bool
    chance: float

    def least_chance(self, tier: str, is_full: bool) -> float:
        assert tier == DISK
        return self.chance


def full() -> int:
    return 0


def admission(
    judges: Judges,
    *,
    writes: bool = True,
    least_chance: float = 0.0,
    num_free: Callable[[], int] = full,
) -> Admission:
    rooms = {DEVICE: Quota(full), HOST: Quota(full), DISK: Quota(num_free)}
    topology = Topology(rooms, {DISK: StorageFacts()})
    index = cast("BlockIndex", judges)
    queues = cast("WriteQueues", Chance(writes, least_chance))
    return Admission(topology, index, cast("TransientBlocks", Noted()), queues)


def test_what_is_worth_a_write_passes_through_memory() -> None:
    judges = Judges({HOST: [1], DISK: [0, 1, 3]})
    assert admission(judges).admit(BLOCKS, HOST) == [0, 1, 3]


def test_nothing_passes_through_where_nothing_is_written() -> None:
    judges = Judges({HOST: [1], DISK: [0, 1, 3]})
    assert admission(judges, writes=False).admit(BLOCKS, HOST) == [1]


def test_what_storage_has_does_not_pass_through() -> None:
    judges = Judges({HOST: [1], DISK: BLOCKS}, on_disk=[0, 2])
    assert admission(judges).admit(BLOCKS, HOST) == [1, 3]


@pytest.mark.parametrize(("least_chance", "let_in"), [(0.0, [0, 1, 2]), (0.1, [1, 2])])
def test_what_is_hardly_used_is_worth_no_write(least_chance: float, let_in: list[int]) -> None:
    judges = Judges({HOST: [], DISK: [0, 1, 2]}, chances=[0.05, 0.1, 0.5, 1.0])
    made = admission(judges, least_chance=least_chance)
    assert made.admit(BLOCKS, HOST) == let_in
    assert made.admit(BLOCKS, DISK) == let_in


def test_storage_with_room_and_no_limit_is_not_asked() -> None:
    made = admission(Judges({HOST: [], DISK: []}), num_free=lambda: 4)
    assert made.admit(BLOCKS, DISK) == BLOCKS
    assert made.admit(BLOCKS, HOST) == BLOCKS


def test_writes_are_dearer_where_little_is_left_of_what_may_be_written() -> None:
    rooms = {HOST: Quota(full), DISK: Quota(full)}
    budget = WriteBudget(24 * 1000, clock=lambda: 0.0)
    line = WriteQueue(
        DISK,
        Topology(rooms, {DISK: StorageFacts()}),
        cast("BlockIndex", None),
        Metrics(is_exposed=False),
        block_bytes=1,
        after_uses=1,
        budget=budget,
    )
    chances = []
    for _ in range(9):
        chances.append((line.least_chance(is_full=False), line.least_chance(is_full=True)))
        line.began(125)
    num_plenty = int((1 - SCARCE_SHARE) * 8) + 1
    assert chances[:num_plenty] == [(0.0, LEAST_CHANCE)] * num_plenty, "as without a limit"
    rising = [chance for chance, _ in chances[num_plenty:]]
    assert LEAST_CHANCE < rising[0] < rising[1] == 1.0
    assert all(with_room == when_full for with_room, when_full in chances[num_plenty:])
