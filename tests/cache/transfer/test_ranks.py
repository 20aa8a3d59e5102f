"""Ranks carry out orders on real tiers, and the reports of several ranks are combined."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvtier.cache.transfer import LocalMover, Move
from kvtier.cache.transfer.mover import Warmed
from kvtier.cache.transfer.ranks import (
    Done,
    Hello,
    RankExecutor,
    RankMover,
    RankOrder,
    RecoveredBlocks,
    Report,
    Verb,
)
from kvtier.core.types import DISK, HOST, BlockKey, BlockName, Slot
from kvtier.devices import find_device
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import HostTier, MemoryTier, StorageTier
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.disk import DiskOptions, DiskSystem, DiskTier
from tests.tiers.disk.faulty_disk import FaultyDisk

SIZE = 8192
GROUP = opaque(SIZE)
KEYS = [BlockKey(bytes([number]) * 32) for number in range(1, 12)]


def named(keys: list[BlockKey]) -> tuple[BlockName, ...]:
    return tuple(BlockName(b"n" * 32, depth, key) for depth, key in enumerate(keys))


def found(keys: list[BlockKey]) -> RecoveredBlocks:
    return RecoveredBlocks(len(keys), b"".join(keys))


def found_by(rank: Rank) -> list[BlockKey]:
    keys = rank.executor.found()[DISK].keys
    assert keys is not None
    return [BlockKey(keys[at : at + 32]) for at in range(0, len(keys), 32)]


class Rank:
    """A rank with eight slots in memory, and storage."""

    def __init__(self, storage: Callable[[HostTier], StorageTier]) -> None:
        self.now = 0.0
        self.host = HostTier(GROUP, 8 * SIZE, find_device("cpu"))
        self.storage: Any = storage(self.host)
        tiers: dict[str, MemoryTier | StorageTier] = {HOST: self.host, DISK: self.storage}
        self.mover = LocalMover(tiers, None, clock=lambda: self.now)
        kept = {DISK: self.storage.kept_keys()}
        self.executor = RankExecutor(self.host, self.mover, kept, clock=lambda: self.now)
        self.num_orders = 0

    def fill(self, slot: int, value: int) -> None:
        self.bytes_of(slot)[:] = value

    def bytes_of(self, slot: int) -> np.ndarray:
        owner: Any = self.host.memory.owner
        return np.frombuffer(owner, np.uint8)[slot * SIZE : (slot + 1) * SIZE]

    def order(
        self, verb: Verb, keys: list[BlockKey], slots: list[int] | None = None, **more: Any
    ) -> int:
        self.num_orders += 1
        slots = [] if slots is None else slots
        order = RankOrder(self.num_orders, verb, DISK, named(keys), tuple(map(Slot, slots)), **more)
        self.executor.carry_out(order)
        return self.num_orders

    def ended(self, order_id: int) -> Done:
        """Return the outcome of an order once it has ended."""
        under_way = self.executor._under_way.get(order_id)
        assert under_way is None or under_way.job.wait(60), "it hangs"
        return self.executor.take_done()[order_id]

    def do(self, verb: Verb, keys: list[BlockKey], slots: list[int]) -> Done:
        return self.ended(self.order(verb, keys, slots))

    def close(self) -> None:
        assert self.executor.close(10)
        self.storage.close()
        self.host.close()


def on_disk(path: Path, num_blocks: int = 6, system: DiskSystem | None = None) -> Rank:
    options = DiskOptions(path=path, capacity_bytes=num_blocks * SIZE)
    return Rank(lambda host: DiskTier(options, GROUP, host.ready_memory, system))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = on_disk(tmp_path)
    yield made
    made.close()


@pytest.fixture
def gated() -> Iterator[Rank]:
    """Return a rank whose storage can be held up and has blocks of an earlier process."""
    shelf = StoredBlocks()
    shelf.blocks.update({key: bytes([at]) * SIZE for at, key in enumerate(KEYS[:4])})
    made = Rank(lambda host: MemoryStorage(GROUP, 6, shelf))
    yield made
    storage_of(made).open_reads.set()
    storage_of(made).open_writes.set()
    made.close()


def storage_of(rank: Rank) -> MemoryStorage:
    assert isinstance(rank.storage, MemoryStorage)
    return rank.storage


def test_block_comes_back_as_it_was(rank: Rank) -> None:
    for slot in range(3):
        rank.fill(slot, slot + 50)
    done = rank.do(Verb.WRITE, KEYS[:3], [0, 1, 2])
    assert (done.failed, done.num_bytes) == (frozenset(), 3 * SIZE)
    assert done.seconds > 0
    done = rank.do(Verb.READ, [KEYS[2], KEYS[0]], [5, 6])
    assert done.failed == frozenset()
    assert (rank.bytes_of(5) == 52).all()
    assert (rank.bytes_of(6) == 50).all()


def test_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    before = on_disk(tmp_path)
    before.fill(0, 7)
    before.do(Verb.WRITE, KEYS[:2], [0, 1])
    before.close()
    after = on_disk(tmp_path)
    assert set(found_by(after)) == set(KEYS[:2])
    assert after.do(Verb.READ, KEYS[:1], [4]).failed == frozenset()
    assert (after.bytes_of(4) == 7).all()
    after.close()


def test_erased_block_is_not_found_again_and_a_dropped_one_is(tmp_path: Path) -> None:
    before = on_disk(tmp_path)
    before.do(Verb.WRITE, KEYS[:3], [0, 1, 2])
    before.order(Verb.ERASE, [KEYS[0], KEYS[9]])
    before.order(Verb.DROP, [KEYS[1]])
    done = before.do(Verb.READ, KEYS[:3], [3, 4, 5])
    assert done.failed == done.gone == {0, 1}
    before.close()
    after = on_disk(tmp_path)
    assert set(found_by(after)) == {KEYS[1], KEYS[2]}
    after.close()


def test_block_that_is_not_there_is_gone_and_the_others_arrive(rank: Rank) -> None:
    rank.do(Verb.WRITE, KEYS[:1], [0])
    done = rank.do(Verb.READ, [KEYS[5], KEYS[0]], [1, 2])
    assert (done.failed, done.gone, done.num_damaged) == ({0}, {0}, 0)


def test_dropped_blocks_make_room(rank: Rank) -> None:
    assert rank.do(Verb.WRITE, KEYS[:6], [0, 1, 2, 3, 4, 5]).failed == frozenset()
    assert rank.do(Verb.WRITE, KEYS[6:8], [6, 7]).failed == {0, 1}, "the disk is full"
    rank.order(Verb.DROP, KEYS[:1])
    assert rank.do(Verb.WRITE, KEYS[6:8], [6, 7]).failed == {1}
    assert rank.do(Verb.READ, KEYS[:1], [0]).failed == {0}
    assert rank.do(Verb.READ, KEYS[6:7], [0]).failed == frozenset()


def test_damaged_block_is_gone(tmp_path: Path) -> None:
    rank = on_disk(tmp_path)
    rank.fill(0, 9)
    rank.do(Verb.WRITE, KEYS[:2], [0, 1])
    with (tmp_path / "data.slab").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    done = rank.do(Verb.READ, KEYS[:2], [2, 3])
    assert (done.failed, done.gone, done.num_damaged) == ({0}, {0}, 1)
    rank.close()


def test_idle_disk_is_scrubbed_and_so_says_how_fast_it_is(rank: Rank) -> None:
    rank.do(Verb.WRITE, KEYS[:2], [0, 1])
    assert rank.executor.take_scrubbed() == (), "it has only begun"
    rank.mover._scrubs[DISK].wait()
    (scrubbed,) = rank.executor.take_scrubbed()
    assert (scrubbed.tier, scrubbed.num_bytes) == (DISK, 2 * SIZE)
    assert scrubbed.seconds > 0
    assert rank.executor.take_scrubbed() == (), "told once"
    rank.now += 10
    rank.executor.take_scrubbed()
    assert rank.mover._scrubs, "and again after a while"


def test_disk_that_refuses_writes_fails_them_and_nothing_else(tmp_path: Path) -> None:
    system = FaultyDisk()
    rank = on_disk(tmp_path, system=system)
    assert rank.do(Verb.WRITE, KEYS[:1], [0]).failed == frozenset()
    system.fail("write", code=errno.ENOSPC, count=100)
    for at in range(1, 5):
        assert rank.do(Verb.WRITE, KEYS[at : at + 1], [at]).failed == {0}
    rank.do(Verb.READ, KEYS[:1], [7])  # a miss or a hit, but never an error
    rank.storage.check_invariants()
    rank.close()


def test_storage_that_fails_again_and_again_is_left_alone(gated: Rank) -> None:
    gated.storage.find(KEYS[:1], 0.0)
    storage_of(gated).unreachable = True
    for _ in range(5):
        done = gated.do(Verb.READ, KEYS[:1], [0])
        assert (done.failed, done.gone) == ({0}, frozenset()), "it is not said to be gone"
    assert len(storage_of(gated).reads) == 3
    storage_of(gated).unreachable = False
    assert gated.do(Verb.READ, KEYS[:1], [0]).failed == {0}, "not yet"
    gated.now += 1
    assert gated.do(Verb.READ, KEYS[:1], [0]).failed == frozenset()


@pytest.mark.parametrize("slot", [8, -1])
@pytest.mark.parametrize("verb", [Verb.READ, Verb.WRITE])
def test_order_for_a_slot_that_is_not_there_is_refused(rank: Rank, verb: Verb, slot: int) -> None:
    rank.do(Verb.WRITE, KEYS[:2], [0, 1])
    rank.fill(0, 3)
    assert rank.do(verb, KEYS[:2], [0, slot]).failed == {0, 1}
    assert (rank.bytes_of(0) == 3).all()


def test_order_for_storage_of_another_rank_is_none_of_its(rank: Rank) -> None:
    rank.executor.carry_out(RankOrder(1, Verb.READ, "elsewhere", named(KEYS[:1]), (Slot(0),)))
    assert rank.executor.take_done() == {}


def test_read_that_somebody_waits_for_passes_the_others(gated: Rank) -> None:
    gated.storage.find(KEYS[:4], 0.0)
    storage = storage_of(gated)
    storage.open_reads.clear()
    first = gated.order(Verb.READ, KEYS[:1], [0])
    assert storage.is_reading.wait(60)
    patient = [gated.order(Verb.READ, [KEYS[at]], [at], urgent=False) for at in (1, 2, 3)]
    gated.order(Verb.HURRY, [], about=patient[2])
    gated.order(Verb.HURRY, [], about=99)
    storage.open_reads.set()
    done: dict[int, Done] = {}
    for each in gated.executor._under_way.values():
        assert each.job.wait(60)
    done = gated.executor.take_done()
    assert done.keys() == {first, *patient}
    assert storage.reads == [[KEYS[0]], [KEYS[3]], [KEYS[1]], [KEYS[2]]]


def test_read_that_nobody_wants_any_more_is_not_begun(gated: Rank) -> None:
    gated.storage.find(KEYS[:4], 0.0)
    storage = storage_of(gated)
    storage.open_reads.clear()
    gated.order(Verb.READ, KEYS[:1], [0])
    assert storage.is_reading.wait(60)
    patient = gated.order(Verb.READ, KEYS[1:2], [1], urgent=False)
    gated.order(Verb.WITHDRAW, [], about=patient)
    done = gated.ended(patient)
    assert (done.withdrawn, done.failed, done.gone) == (True, {0}, frozenset())
    storage.open_reads.set()


# -- in the deciding process ---------------------------------------------------------------------


def _mover(num_ranks: int = 2) -> RankMover:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, num_ranks, num_ranks)
    for rank in range(num_ranks):
        mover.hear(Report(hellos={rank: Hello(8, {DISK: RecoveredBlocks()})}))
    return mover


def _read(num_blocks: int, urgent: bool = True) -> tuple[RankMover, RankOrder]:
    mover = _mover()
    slots = [Slot(at) for at in range(num_blocks)]
    mover.begin(Move(DISK, HOST, slots, slots, named(KEYS[:num_blocks])), urgent)
    (order,) = mover.take_orders()
    return mover, order


def test_ranks_say_when_storage_is_left_alone_and_the_worst_counts() -> None:
    mover = _mover()
    assert mover.breaker(DISK) is BreakerState.CLOSED
    one = Report(breakers={(0, DISK): BreakerState.OPEN})
    other = Report(breakers={(1, DISK): BreakerState.HALF_OPEN})
    assert one
    mover.hear(one.and_also(other))
    assert mover.breaker(DISK) is BreakerState.OPEN
    mover.hear(Report(breakers={(0, DISK): BreakerState.CLOSED}))
    assert mover.breaker(DISK) is BreakerState.HALF_OPEN


def test_a_rank_tells_what_is_new_of_its_storage(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rank = on_disk(tmp_path, system=disk)
    assert rank.executor.take_breakers() == {}
    disk.fail("write", count=100)
    for key in KEYS[:8]:
        assert rank.do(Verb.WRITE, [key], [0]).failed
    assert rank.executor.take_breakers() == {(0, DISK): BreakerState.OPEN}
    assert rank.executor.take_breakers() == {}
    rank.close()


@pytest.mark.parametrize(("verb", "in_time"), [(Verb.READ, 15.0), (Verb.WRITE, 65.0)])
def test_rank_says_that_storage_hangs_and_later_how_it_ended(
    gated: Rank, verb: Verb, in_time: float
) -> None:
    gated.storage.find(KEYS[:4], 0.0)
    storage = storage_of(gated)
    storage.open_reads.clear()
    storage.open_writes.clear()
    keys = KEYS[:2] if verb is Verb.READ else KEYS[4:6]
    first, second = (gated.order(verb, [key], [at]) for at, key in enumerate(keys))
    gated.now = in_time
    assert gated.executor.take_done() == {}
    gated.now += 1
    late = gated.executor.take_done()
    assert late.keys() == {first, second}, "the second one stands in line for ever"
    assert all(each.is_late and not each.num_ranks for each in late.values())
    assert gated.executor.take_done() == {}, "said once"
    storage.open_reads.set()
    storage.open_writes.set()
    for each in gated.executor._under_way.values():
        assert each.job.wait(60)
    ended = Done(num_bytes=SIZE, seconds=ANY)
    assert gated.executor.take_done() == {first: ended, second: ended}


def test_long_line_is_not_late_while_it_moves(gated: Rank) -> None:
    gated.storage.find(KEYS[:4], 0.0)
    storage = storage_of(gated)
    storage.open_reads.clear()
    first, second = (gated.order(Verb.READ, [KEYS[at]], [at]) for at in (0, 1))
    gated.now = 14.0
    storage.open_reads.set()
    gated.ended(first)
    gated.now = 28.0
    assert not any(each.is_late for each in gated.executor.take_done().values())
    under_way = gated.executor._under_way.get(second)
    assert under_way is None or under_way.job.wait(60)


def test_reports_of_ranks_become_one() -> None:
    one = Report({1: Done(frozenset({0}), num_bytes=10, seconds=1.0)}, failed=frozenset({Slot(3)}))
    other = Report({1: Done(frozenset({2}), num_bytes=10, seconds=3.0), 2: Done()})
    both = one.and_also(other)
    assert both.done[1] == Done(frozenset({0, 2}), num_ranks=2, num_bytes=10, seconds=3.0)
    assert both.done[2] == Done()
    assert both.failed == {3}
    assert both
    assert not Report()


def test_what_one_rank_could_not_move_has_not_moved() -> None:
    mover, order = _read(3)
    (job,) = (each.job for each in mover._moving.values())
    mover.hear(Report({order.order_id: Done(frozenset({1}), frozenset({1}), 1)}))
    assert not job.done
    assert mover.is_busy
    mover.hear(Report({order.order_id: Done(frozenset({2}), num_bytes=3 * SIZE, seconds=2.0)}))
    assert job.done
    assert (job.lost, job.gone, job.num_damaged, job.seconds) == ({1, 2}, {1}, 1, 2.0)
    assert not mover.is_busy


@pytest.mark.parametrize("is_one_report", [True, False])
def test_late_move_is_not_waited_for_and_keeps_its_slots(is_one_report: bool) -> None:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, num_ranks=2, num_storage_ranks=2)
    for rank in range(2):
        mover.hear(Report(hellos={rank: Hello(8, {DISK: RecoveredBlocks()})}))
    job = mover.begin(Move(HOST, DISK, [Slot(0)], [Slot(0)], named(KEYS[:1])))
    (order,) = mover.take_orders()
    late = Report({order.order_id: Done(num_ranks=0, is_late=True)})
    ended = Report({order.order_id: Done(num_bytes=SIZE)})
    for report in [late.and_also(ended)] if is_one_report else [late, ended]:
        mover.hear(report)
    assert (job.is_late, job.done, mover.is_busy) == (True, False, False)
    assert not mover.accepts((HOST, DISK))
    assert mover.accepts((DISK, HOST)), "what can't be written may be read"
    mover.hear(ended)
    assert job.succeeded
    assert mover.accepts((HOST, DISK))


def test_nobody_is_sent_to_a_disk_whose_reads_hang() -> None:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, num_ranks=1, num_storage_ranks=1)
    mover.hear(Report(hellos={0: Hello(8, {DISK: RecoveredBlocks()})}))
    mover.begin(Move(DISK, HOST, [Slot(0)], [Slot(0)], named(KEYS[:1])))
    (order,) = mover.take_orders()
    assert mover.queued_s((DISK, HOST), float) == SIZE
    mover.hear(Report({order.order_id: Done(num_ranks=0, is_late=True)}))
    assert mover.queued_s((DISK, HOST), float) == inf
    mover.hear(Report({order.order_id: Done(num_bytes=SIZE)}))
    assert mover.queued_s((DISK, HOST), float) == 0


def test_what_stands_in_line_at_the_ranks_counts() -> None:
    mover, order = _read(3)
    assert mover.queued_s((DISK, HOST), float) == 3 * SIZE
    assert not mover.is_idle(DISK)
    mover.hear(Report({order.order_id: Done(num_ranks=2)}))
    assert mover.queued_s((DISK, HOST), float) == 0
    assert mover.is_idle(DISK)


def test_ranks_are_told_what_is_hurried_or_withdrawn() -> None:
    mover, order = _read(1, urgent=False)
    assert not order.urgent
    (job,) = (each.job for each in mover._moving.values())
    mover.hurry((DISK, HOST), job)
    assert not mover.withdraw((DISK, HOST), job), "nobody knows yet whether it was in time"
    told = [(order.verb, order.about) for order in mover.take_orders()]
    assert told == [(Verb.HURRY, order.order_id), (Verb.WITHDRAW, order.order_id)]


def test_what_ranks_have_scrubbed_is_told_once(rank: Rank) -> None:
    rank.do(Verb.WRITE, KEYS[:2], [0, 1])
    rank.executor.take_scrubbed()
    rank.mover._scrubs[DISK].wait()
    mover = _mover()
    mover.hear(Report(scrubbed=rank.executor.take_scrubbed()))
    assert [each.num_bytes for each in mover.scrub()] == [2 * SIZE]
    assert mover.scrub() == []


def test_what_warm_starts_of_ranks_have_copied_is_reported_once() -> None:
    mover, warmed = _mover(), Warmed("near", 3, 3 * SIZE)
    assert Report(warmed=(warmed,)), "it is sent"
    mover.hear(Report(warmed=(warmed,)).and_also(Report(warmed=(warmed,))))
    assert mover.warmed() == [warmed, warmed]
    assert mover.warmed() == []


def test_ranks_without_storage_of_their_own_are_not_waited_for() -> None:
    """If all ranks have the same KV, the first one stores for all."""
    mover = RankMover({DISK: DiskTier.facts}, SIZE, 2, 1)
    mover.hear(Report(hellos={1: Hello(8)}))
    assert not mover.is_complete
    mover.hear(Report(hellos={0: Hello(4, {DISK: found(KEYS[:1])})}))
    assert mover.is_complete
    assert mover.num_open == 4
    assert mover.find(DISK, KEYS[:2]).places_there == [0]
    job = mover.begin(Move(HOST, DISK, [Slot(0)], [Slot(0)], named(KEYS[1:2])))
    (order,) = mover.take_orders()
    mover.hear(Report({order.order_id: Done()}))
    assert job.succeeded


def test_what_was_dropped_before_all_ranks_said_hello_is_not_found() -> None:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, 2, 2)
    mover.hear(Report(hellos={0: Hello(8, {DISK: found(KEYS[:4])})}))
    mover.drop(DISK, KEYS[:1], for_good=True)
    mover.drop(DISK, KEYS[1:2])
    assert mover.take_orders() == []
    mover.hear(Report(hellos={1: Hello(8, {DISK: found(KEYS[:3])})}))
    assert mover.find(DISK, KEYS[:3]).places_there == [2]
    told = {order.verb: [name.key for name in order.names] for order in mover.take_orders()[:2]}
    assert told == {Verb.ERASE: KEYS[:1], Verb.DROP: KEYS[1:2]}


@pytest.mark.parametrize("for_good", [True, False])
def test_what_was_dropped_before_anybody_asked_is_not_found(for_good: bool) -> None:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, 1, 1)
    mover.hear(Report(hellos={0: Hello(8, {DISK: found(KEYS[:2])})}))
    mover.drop(DISK, KEYS[:1], for_good=for_good)
    assert mover.find(DISK, KEYS[:2]).places_there == [1]


def test_order_to_erase_that_the_disk_could_not_carry_out_is_carried_out_later(
    tmp_path: Path,
) -> None:
    system = FaultyDisk()
    before = on_disk(tmp_path, system=system)
    before.do(Verb.WRITE, KEYS[:2], [0, 1])
    system.fail("journal")
    before.order(Verb.ERASE, KEYS[:1])
    assert before.do(Verb.READ, KEYS[:2], [3, 4]).gone == {0}
    assert before.do(Verb.WRITE, KEYS[:1], [0]).failed == {0}, "or the drop would meet it"
    before.executor.take_scrubbed()
    assert before.do(Verb.WRITE, KEYS[:1], [0]).failed == frozenset()
    before.order(Verb.ERASE, KEYS[:1])
    before.storage.abandon()
    before.mover.close(10)
    before.host.close()
    after = on_disk(tmp_path)
    assert set(found_by(after)) == {KEYS[1]}
    after.close()


def _told(rank: Rank, order: RankOrder) -> list[BlockKey]:
    """Return the keys of a rank's answer to ``LIST``, from all its reports."""
    rank.executor.carry_out(order)
    content = b""
    while pieces := rank.executor.take_pieces():
        content += b"".join(piece.keys for piece in pieces)
    return [BlockKey(content[at : at + 32]) for at in range(0, len(content), 32)]


def test_kept_keys_are_told_last_to_leave_first_and_not_those_that_are_gone(
    tmp_path: Path,
) -> None:
    before = on_disk(tmp_path)
    before.do(Verb.WRITE, KEYS[:6], [0, 1, 2, 3, 4, 5])
    before.close()
    after = on_disk(tmp_path)
    listing = RankOrder(100, Verb.LIST, DISK, num=2)
    assert _told(after, listing) == [KEYS[1], KEYS[0], KEYS[3], KEYS[2], KEYS[5], KEYS[4]]
    assert _told(after, RankOrder(101, Verb.LIST, DISK, ranks=(1,), num=2)) == [], "another rank's"
    assert after.do(Verb.WRITE, KEYS[6:8], [6, 7]).failed == frozenset()
    assert set(_told(after, listing)) == set(KEYS[:4]), "the deepest ones went for them"
    after.close()


def test_what_nobody_asked_for_is_cleared_for_good_before_anything_else_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.transfer.ranks.recovery_reports.CLEARED_PER_STEP", 4)
    before = on_disk(tmp_path)
    before.do(Verb.WRITE, KEYS[:6], [0, 1, 2, 3, 4, 5])
    before.close()
    after = on_disk(tmp_path)
    after.executor.carry_out(RankOrder(100, Verb.CLEAR, DISK))
    write = after.order(Verb.WRITE, KEYS[:1], [0])
    after.executor.take_pieces()
    assert not after.executor._under_way, "it would be cleared as well"
    after.executor.take_pieces()
    assert after.ended(write).failed == frozenset()
    after.close()
    again = on_disk(tmp_path)
    assert found_by(again) == KEYS[:1]
    again.close()


def test_storage_has_room_for_what_the_smallest_rank_can_keep() -> None:
    mover = RankMover({DISK: DiskTier.facts}, SIZE, 3, 2)
    assert mover.num_blocks(DISK) is None
    mover.hear(Report(hellos={0: Hello(8, {DISK: RecoveredBlocks()}, num_blocks={DISK: 48})}))
    mover.hear(Report(hellos={1: Hello(8, {DISK: RecoveredBlocks()}, num_blocks={DISK: 24})}))
    mover.hear(Report(hellos={2: Hello(8)}))  # without storage
    assert mover.num_blocks(DISK) == 24
    mover.hear(Report(hellos={0: Hello(8, num_blocks={DISK: 12})}))  # its disk has shrunk
    assert mover.num_blocks(DISK) == 12
