"""Parts of the engines that reach an accelerator: runs, registrations, answers, fences, threads."""

from __future__ import annotations

import errno
import threading
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import DeviceError
from kvtier.devices.base import Fence, Memory
from kvtier.tiers.disk.io.direct import PendingFences, Workers
from kvtier.tiers.disk.io.file_library import outcome
from kvtier.tiers.disk.io.registered import RegisteredMemory

PAGE = 4096


@given(
    areas=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5),
    pieces=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=20),
    random=st.randoms(use_true_random=False),
)
def test_a_piece_is_registered_where_one_area_holds_all_of_it(
    areas: list[tuple[int, int]], pieces: list[tuple[int, int]], random: Random
) -> None:
    """areas: in pages, the gap before each and its size. pieces: place and size."""
    memories, end = [], 1
    for gap, pages in areas:
        memories.append(Memory((end + gap) * PAGE, pages * PAGE, "", None))
        end += gap + pages
    random.shuffle(memories)
    addresses = np.array([at * PAGE for at, _ in pieces], np.uint64)
    sizes = np.array([pages * PAGE for _, pages in pieces], np.int64)
    found = RegisteredMemory(memories).bases(addresses, sizes).tolist()
    for (at, pages), base in zip(pieces, found, strict=True):
        if not pages:
            continue  # nothing is moved
        holding = [
            memory.address
            for memory in memories
            if memory.address <= at * PAGE and (at + pages) * PAGE <= memory.address + memory.nbytes
        ]
        assert base == (holding[0] if holding else 0)


@pytest.mark.parametrize(
    ("answer", "left", "told"),
    [
        (PAGE, 0, PAGE), (0, 5, 0), (PAGE + 1, 0, -errno.EIO),
        (-1, errno.ENOSPC, -errno.ENOSPC), (-1, 0, -errno.EIO),
        (-1, 5027, -errno.EBADF), (-1, 5030, -errno.EIO),
        (-errno.EFAULT, 0, -errno.EFAULT), (-5012, 0, -errno.EFAULT), (-5030, 0, -errno.EIO),
        (-(1 << 40), 0, -errno.EIO),
    ],
)  # fmt: skip
def test_an_answer_is_bytes_or_an_errno(answer: int, left: int, told: int) -> None:
    assert outcome(answer, PAGE, left) == told


class Gate(Fence):
    """Fence that the test opens, or lets fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.error = ""

    def _check(self) -> None:
        if self.error:
            raise DeviceError(self.error)

    @property
    def passed(self) -> bool:
        self._check()
        return self.opened.is_set()

    def wait(self) -> None:
        assert self.opened.wait(60)
        self._check()

    def hold_compute(self) -> None:
        raise NotImplementedError


def test_each_direction_waits_for_a_fence_of_its_own() -> None:
    held, gates = PendingFences(), [Gate(), Gate()]
    for gate in gates:
        held.add(gate)
    assert held.wait(False, 0.0) == -errno.ECANCELED
    gates[0].opened.set()
    assert held.wait(False, 0.0) == -errno.ECANCELED, "the second one is waited for, too"
    gates[1].opened.set()
    assert held.wait(False, 0.0) == 0
    assert held.wait(True, None) == 0


def test_work_that_failed_is_told_once_and_the_rest_is_waited_for() -> None:
    held, bad, good = PendingFences(), Gate(), Gate()
    bad.error = "lost"
    held.add(bad)
    held.add(good)
    for write in (False, True):
        assert held.wait(write, 0.0) == -errno.EIO
        assert held.wait(write, 0.0) == -errno.ECANCELED
    good.opened.set()
    assert held.wait(False, 0.0) == held.wait(True, None) == 0


def test_fences_of_a_direction_that_is_not_used_are_not_kept() -> None:
    held = PendingFences()
    for _ in range(1000):
        gate = Gate()
        held.add(gate)
        gate.opened.set()
    assert max(map(len, held._fences.values())) == 1


def test_an_error_in_a_job_comes_out_when_all_jobs_are_done() -> None:
    workers, numbers = Workers("test", 4), iter(range(8))
    lock, done = threading.Lock(), []

    def work() -> None:
        with lock:
            number = next(numbers)
        if number == 3:
            raise ValueError(number)
        done.append(number)

    errors = [job.exception(60) for job in workers.run(work, 8)]
    assert [type(error) for error in errors if error is not None] == [ValueError]
    assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]
    assert workers.run(work, 0) == []
    workers.close()
    workers.close()
