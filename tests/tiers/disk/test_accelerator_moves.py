"""Movers of blocks between an accelerator and a disk, and the events that they wait for.

A file library's transfers are not ordered by a stream. The control of each test drops the fences,
and the fakes notice it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.transfer import Job, LocalMover, Move
from kvtier.cache.transfer.ranks import Done, RankExecutor, RankOrder, Verb
from kvtier.core.types import DEVICE, DISK, Slot
from kvtier.devices import Fence
from kvtier.devices.synchronous import Passed
from kvtier.tiers import MemoryTier, StorageTier
from kvtier.tiers.disk import DiskTier
from tests.kit.fakes.storage import LIBRARIES
from tests.kit.waiting import wait_until
from tests.tiers.disk.accelerated import BY_LAYER, NUM_BLOCKS, THERE, Accelerated, keys, names

SLOTS = [Slot(at) for at in range(NUM_BLOCKS)]
OTHERS = [Slot(at + 2) for at in range(NUM_BLOCKS)]


class Moving:
    """A mover between the pool and the disk without host memory, beside compute on a stream."""

    def __init__(self, name: str, folder: Path) -> None:
        stream: list[int] = []
        self.harness = Accelerated(name, folder, compute=lambda: stream[0], cuts=BY_LAYER)
        stream.append(self.harness.fake.compute_stream())
        self.stream = stream[0]
        self.disk: DiskTier = self.harness.open()
        tiers: dict[str, MemoryTier | StorageTier] = {DEVICE: self.harness.pool, DISK: self.disk}
        self.mover = LocalMover(tiers, self.harness.device)

    def begin(self, src: str, dst: str, slots: list[Slot] | None = None) -> Job:
        at = SLOTS if slots is None else slots
        return self.mover.begin(Move(src, dst, at, at, names()))

    def compute(self, value: int) -> None:
        """Queue compute that sets every byte of the pool at some time."""
        memory = self.harness.pool.memory
        self.harness.fake.fill(memory.address, memory.nbytes, value, self.stream)

    def close(self) -> None:
        self.harness.fake.release()
        assert not self.mover.close(60)
        self.harness.close()
        assert self.harness.fake.storage_leaks == []
        assert self.harness.fake.leaks == []


@pytest.fixture(params=LIBRARIES)
def moving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Moving]:
    made = Moving(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["with fences", "without"])
def heeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, moving: Moving) -> bool:
    """Whether fences are made; without them the fakes have to notice a race."""
    if not request.param:

        def drop() -> Fence:
            return Passed()

        monkeypatch.setattr(moving.harness.device, "fence", drop)
    return bool(request.param)


@pytest.mark.parametrize("is_trusted", [True, False], ids=["direct", "by the buffer"])
def test_a_read_waits_for_those_who_use_its_slots_still(
    moving: Moving, heeds: bool, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = moving.harness
    assert moving.disk.put(names(), harness.in_host(), 60) == THERE
    if not is_trusted:
        part = moving.disk.blocks.parts[0]
        monkeypatch.setattr(part.accelerator, "enter", lambda: False)
    harness.fake.hold()
    moving.compute(7)
    job = moving.begin(DISK, DEVICE)
    if heeds:
        assert not job.wait(0.05)
        assert harness.fake.num_transfers == 0
    elif is_trusted:
        assert job.wait(60), "a file library waits for no stream"
    else:
        wait_until(
            lambda: harness.fake.num_pending > 1
        )  # the device's copies stand beside its compute
    harness.fake.release()
    assert job.wait(60)
    assert job.succeeded
    harness.device.fence().wait()
    harness.fake.wait_for(moving.stream)
    is_right = np.array_equal(
        harness.pool_bytes(), harness.expected(np.full_like(harness.pool_bytes(), 7), SLOTS, SLOTS)
    )
    assert (harness.fake.violations == []) == heeds
    assert is_right or not heeds


def test_a_write_waits_until_its_blocks_are_computed(moving: Moving, heeds: bool) -> None:
    """Writes go through host memory, where the processor can compute checksums."""
    harness = moving.harness
    harness.fill_pool(1)
    harness.fake.hold()
    moving.compute(9)
    job = moving.begin(DEVICE, DISK)
    if not heeds:  # time to begin before what it should have waited for
        time.sleep(0.3)
    harness.fake.release()
    assert job.wait(60)
    assert job.succeeded
    assert (harness.fake.violations == []) == heeds
    assert harness.fake.num_transfers == 0
    if heeds:
        assert moving.disk.get(keys(), harness.in_host(), 60) == THERE
        assert (harness.content == 9).all()


def test_blocks_come_back_to_other_places(moving: Moving) -> None:
    harness = moving.harness
    before = harness.expected(np.zeros(harness.pool.memory.nbytes, np.uint8), SLOTS, SLOTS)
    harness.fill_pool(before)
    assert moving.begin(DEVICE, DISK).wait(60)
    harness.fill_pool(0)
    job = moving.begin(DISK, DEVICE, OTHERS)
    assert job.wait(60)
    assert job.succeeded
    zeros = np.zeros(harness.pool.memory.nbytes, np.uint8)
    assert np.array_equal(harness.pool_bytes(), harness.expected(zeros, OTHERS, SLOTS))
    assert harness.fake.num_transfers > 0
    assert harness.fake.violations == []


def test_a_rank_carries_out_what_it_is_ordered(moving: Moving) -> None:
    """Orders that name slots of the accelerator: the same executor, with nothing in between."""
    harness = moving.harness
    before = harness.expected(np.zeros(harness.pool.memory.nbytes, np.uint8), SLOTS, SLOTS)
    harness.fill_pool(before)
    executor = RankExecutor(harness.pool, moving.mover, {DISK: moving.disk.kept_keys()})

    def carry_out(number: int, verb: Verb) -> Done:
        executor.carry_out(RankOrder(number, verb, DISK, tuple(names()), tuple(SLOTS)))
        done: dict[int, Done] = {}

        def is_done() -> bool:
            done.update(executor.take_done())
            return number in done

        wait_until(is_done)
        return done[number]

    assert not carry_out(1, Verb.WRITE).failed
    harness.fill_pool(0)
    read = carry_out(2, Verb.READ)
    assert not read.failed
    assert read.num_bytes == NUM_BLOCKS * harness.group.bytes_per_block
    assert np.array_equal(harness.pool_bytes(), before)
    assert harness.fake.num_transfers > 0
    assert harness.fake.violations == []
