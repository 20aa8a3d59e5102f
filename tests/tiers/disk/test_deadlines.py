"""A call ends at its own time-out or at the disk's deadline, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvtier.core.types import BlockName
from kvtier.layout import KVGroup
from kvtier.testing.storage_user import NAMESPACE, Scattered, User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.part import _Limit
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import ALIGNED, SLOT_BYTES, SMALL, Clock, finding

THERE, ABSENT, _, FAILED = Outcome


@contextmanager
def a_tier(
    folder: Path,
    group: KVGroup = SMALL,
    num_blocks: int = 8,
    clock: Clock | None = None,
    **changes: Any,
) -> Iterator[tuple[DiskTier, FaultyDisk]]:
    """Yield a tier for ``num_blocks`` blocks, and the disk system below it."""
    system = FaultyDisk()
    options = DiskOptions(folder / "slab", num_blocks * SLOT_BYTES, **changes)
    tier = DiskTier(options, group, system=system, monotonic=clock or time.monotonic)
    yield tier, system
    system.release(*system.OPERATIONS)
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize(
    ("timeout_s", "deadline_s", "first_s"),
    [(5.0, 40.0, 5.0), (40.0, 5.0, 5.0), (inf, 5.0, 5.0)],
)
def test_the_earlier_of_two_deadlines_holds(
    tmp_path: Path, timeout_s: float, deadline_s: float, first_s: float
) -> None:
    deadlines: Any = {"read_deadline_s": deadline_s, "write_deadline_s": deadline_s}
    with a_tier(tmp_path, **deadlines) as (tier, system):
        user = User(tier, timeout_s=timeout_s)
        assert user.put(0, 1) == user.get(0, 1) == [THERE] * 2
        assert [way for way, _ in system.deadlines] == ["write", "read"]
        for _, told_s in system.deadlines:
            assert told_s is not None
            assert first_s - 4 < told_s <= first_s


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("group", [SMALL, ALIGNED], ids=["bounced", "aligned"])
def test_what_hangs_is_given_up_when_the_first_deadline_comes(
    tmp_path: Path, operation: str, group: KVGroup
) -> None:
    for timeout_s, deadline_s in ((0.05, 60.0), (60.0, 0.5)):
        deadlines: Any = {"read_deadline_s": deadline_s, "write_deadline_s": deadline_s}
        with a_tier(tmp_path, group, **deadlines) as (tier, system):
            User(tier).put(0, 1)
            system.stall(operation)
            user, began = User(tier, timeout_s=timeout_s), time.monotonic()
            if operation == "read":
                assert user.get(0, 1) == [FAILED] * 2
            else:
                assert user.put(2, 3) == [FAILED] * 2
            assert time.monotonic() - began < 20
            system.release(operation)
            assert User(tier).get(0, 1) == [THERE] * 2
            tier.drop([stored_key(0), stored_key(1)], for_good=True)


def test_blocks_of_many_namespaces_have_one_deadline_together(tmp_path: Path) -> None:
    with a_tier(tmp_path, write_deadline_s=1.0) as (tier, system):
        names = [BlockName(bytes([at]) * 32, 0, stored_key(at)) for at in range(6)]
        memory = Scattered(6, [tier.bytes_per_block])
        system.stall("write", after=2)
        assert tier.put(names, memory.pieces) == [THERE] * 2 + [FAILED] * 4
        assert len(system.deadlines) == 3, "the disk was asked again, though the time was over"
        first_s, *_, last_s = (told_s or inf for _, told_s in system.deadlines)
        assert last_s < first_s, "the last one has what the others left"
        system.release("write")
        assert tier.put(names, memory.pieces) == [THERE] * 6


def test_memory_of_blocks_that_did_not_come_in_time_is_as_it_was(tmp_path: Path) -> None:
    """Their part of the buffer has bytes of other blocks, which must not be copied."""
    with a_tier(tmp_path, bounce_bytes=2 * SLOT_BYTES) as (tier, system):
        User(tier).put(*range(8))
        memory = Scattered(8, [tier.bytes_per_block])
        system.stall("read", after=3)
        outcomes = tier.get([stored_key(at) for at in range(8)], memory.pieces, 0.5)
        assert outcomes == [THERE] * 3 + [FAILED] * 5
        assert [memory.is_untouched(at) for at in range(8)] == [False] * 3 + [True] * 5
        assert len(system.deadlines) == 4 + 2, "nothing is begun when the time is over"


def test_time_that_is_over_costs_nothing(tmp_path: Path) -> None:
    """No I/O is started, and no recovered block is evicted for a write that would fail."""
    with a_tier(tmp_path, num_blocks=4) as (tier, _):
        User(tier).put(*range(4))
    with a_tier(tmp_path, num_blocks=4) as (tier, system):
        late = User(tier, timeout_s=0)
        assert late.find(0) == [THERE], "which needs no time"
        assert late.put(0, 9) == [THERE, FAILED]
        assert late.get(0) == [FAILED]
        assert system.deadlines == []
        assert User(tier).find(*range(4)) == [THERE] * 4


@pytest.mark.parametrize("operation", ["read", "write"])
def test_call_that_asks_nothing_of_the_disk_is_not_its_trial(
    tmp_path: Path, operation: str
) -> None:
    clock = Clock()
    with a_tier(tmp_path, errors_until_off=1, clock=clock) as (tier, system):
        user, late = User(tier), User(tier, timeout_s=0)
        assert user.put(0) == [THERE]
        system.fail(operation)
        assert (user.get(0) if operation == "read" else user.put(1)) == [FAILED]
        clock.now += 1
        if operation == "read":
            assert late.get(0) == [FAILED]
            assert user.get(0) == [THERE]
        else:
            assert late.put(1) == [FAILED]
            assert user.put(0) == [THERE], "it is there already"
            assert user.put(1) == [THERE]


def test_look_up_does_not_wait_for_a_drop_that_hangs(tmp_path: Path) -> None:
    with a_tier(tmp_path) as (tier, system):
        User(tier).put(0, 1)
        system.hold("journal")
        drop = Thread(target=tier.drop, args=([stored_key(0)], True))
        drop.start()
        user = User(tier, timeout_s=0.05)
        while not tier._lock.locked():
            time.sleep(0.001)
        assert user.find(1) == user.get(1) == user.put(2) == [FAILED]
        system.release("journal")
        drop.join()
        assert User(tier).find(0) == [ABSENT]
        assert User(tier).get(1) == [THERE]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_callers_in_a_hurry_do_not_stop_a_disk_and_patient_ones_do(
    tmp_path: Path, operation: str
) -> None:
    def ask(tier: DiskTier, timeout_s: float) -> None:
        user = User(tier, timeout_s=timeout_s)
        assert (user.get(0) if operation == "read" else user.put(1)) == [FAILED]

    deadlines: Any = {"read_deadline_s": 0.5, "write_deadline_s": 0.5}
    with a_tier(tmp_path, **deadlines) as (tier, system):
        User(tier).put(0)
        system.stall(operation)
        for _ in range(5):
            ask(tier, 0.1)
        assert "not" not in finding(tier, "disk tier").found
        for _ in range(3):
            ask(tier, 60)
        assert ("not read" if operation == "read" else "not written") in finding(
            tier, "disk tier"
        ).found


def test_less_than_half_of_the_deadline_is_a_hurry() -> None:
    now = time.monotonic()
    assert [_Limit(100, now + left_s).is_patient for left_s in (40, 70, inf)] == [False, True, True]


def test_late_blocks_do_not_hide_errors_of_others(tmp_path: Path) -> None:
    with a_tier(tmp_path, errors_until_off=2) as (tier, system):
        User(tier).put(*range(4))
        system.fail("read", count=2)
        system.stall("read", after=2)
        assert User(tier, timeout_s=0.5).get(*range(4)) == [FAILED] * 4
        assert "not read" in finding(tier, "disk tier").found


@pytest.mark.parametrize("which", ["get", "put"])
def test_block_in_two_parts_has_one_deadline(tmp_path: Path, which: str) -> None:
    paths = (tmp_path / "other",)
    with a_tier(tmp_path, more_paths=paths) as (tier, system):
        User(tier).put(0)
        system.stall("read", "write", after=1)
        user = User(tier, timeout_s=0.05)
        call: Callable[..., list[Outcome]] = getattr(user, which)
        assert call(0 if which == "get" else 1) == [FAILED]
        system.release("read", "write")
        assert User(tier).get(0) == [THERE]
        assert User(tier).get(1) == [ABSENT], "one part is none"
        names = [BlockName(NAMESPACE, 0, stored_key(1))]
        assert tier.put(names, Scattered(1, [tier.bytes_per_block]).pieces) == [THERE]
