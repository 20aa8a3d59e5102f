"""Faults of a file library: errors, wrong results, short transfers, and calls that never return."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.errors import Closed, TierError
from kvtier.tiers.disk.arrays import Int64s
from kvtier.tiers.disk.io import batch_queue, direct, file_library
from tests.kit.fakes.storage import Cancel, Fault
from tests.kit.waiting import wait_until
from tests.tiers.disk.direct_harness import BATCHES, PAGE, WAYS, Batch, Harness, direct_harness

COMPLETE, FAILED, TIMEOUT, INVALID = 16, 64, 32, 4


@pytest.fixture(params=WAYS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    with direct_harness(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=BATCHES)
def batches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    with direct_harness(request.param, tmp_path) as made:
        yield made


def apart(harness: Harness, num: int = 10) -> Batch:
    """Return pieces of two pages that are apart in the file, so that each is a transfer."""
    return harness.batch(*((4 * at, 3 * at, 2) for at in range(num)))


def check_read(harness: Harness, results: list[int], *but: int) -> None:
    """Check that each piece of ``apart`` was read whole, except those with the results ``but``."""
    assert sorted(result for result in results if result != 2 * PAGE) == sorted(but)
    for at, result in enumerate(results):
        if result == 2 * PAGE:
            assert np.array_equal(harness.in_memory(3 * at, 2), harness.page(4 * at, 2))


# -- one transfer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EIO, errno.EIO), (errno.ENOSPC, errno.ENOSPC), (5024, errno.EFAULT),
        (5014, errno.EFAULT), (5027, errno.EBADF), (5022, errno.EINVAL), (5044, errno.EIO),
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", [False, True])
def test_a_transfer_that_fails_costs_its_piece(
    harness: Harness, code: int, told: int, write: bool
) -> None:
    engine = harness.open()
    harness.fake.fail_transfer(Fault.ERROR, code, nth=4)
    if write:
        results = engine.write(*apart(harness)).tolist()
        assert sorted(result for result in results if result != 2 * PAGE) == [-told]
        for at, result in enumerate(results):
            assert harness.in_file(4 * at, 2).any() == (result < 0), "the memory is all 0"
    else:
        check_read(harness, engine.read(*apart(harness)).tolist(), -told)
    assert engine.read(*apart(harness)).tolist() == [2 * PAGE] * 10, "the next batch is served"


def test_a_run_that_fails_is_told_piece_by_piece(tmp_path: Path) -> None:
    """One vectored call fails, so each piece is retried by itself to find the failing ones."""
    with direct_harness("cufile120-vectors", tmp_path) as harness:
        engine = harness.open()
        harness.fake.fail_transfer(Fault.ERROR, errno.EIO)
        batch = harness.batch(*((at, 2 * at, 1) for at in range(20)))
        assert engine.read(*batch).tolist() == [PAGE] * 20
        assert harness.fake.count("cuFileReadv") == 1
        assert harness.fake.count("cuFileRead") == 20
        for at in range(20):
            assert np.array_equal(harness.in_memory(2 * at, 1), harness.page(at))
        only_read = os.open(harness.path, os.O_RDONLY | os.O_DIRECT)
        other = harness.open(only_read)
        assert other.write(*batch).tolist() == [-errno.EBADF] * 20
        other.close()
        os.close(only_read)


def test_pieces_that_follow_each_other_are_one_call(tmp_path: Path) -> None:
    """They may be anywhere in memory, and in any order in the batch."""
    with direct_harness("cufile120-vectors", tmp_path) as harness:
        engine = harness.open()
        pieces = [(at, 2 * ((7 * at) % 50), 1) for at in range(50)]
        order = np.random.default_rng(1).permutation(50)
        batch = harness.batch(*(pieces[at] for at in order))
        assert engine.read(*batch).tolist() == [PAGE] * 50
        assert (harness.fake.count("cuFileReadv"), harness.fake.count("cuFileRead")) == (1, 0)
        for offset, place, _ in pieces:
            assert np.array_equal(harness.in_memory(place, 1), harness.page(offset))


@pytest.mark.parametrize(
    ("fault", "value", "told"),
    [
        (Fault.LIE, errno.EIO, errno.EIO), (Fault.LIE, 5024, errno.EFAULT),
        (Fault.STATUS, FAILED, errno.EIO), (Fault.STATUS, TIMEOUT, errno.EIO),
        (Fault.STATUS, INVALID, errno.EIO), (Fault.STATUS, COMPLETE | FAILED, errno.EIO),
    ],
)  # fmt: skip
def test_both_halves_of_an_event_have_to_be_good(
    batches: Harness, fault: Fault, value: int, told: int
) -> None:
    engine = batches.open()
    batches.fake.fail_transfer(fault, value, nth=3)
    check_read(batches, engine.read(*apart(batches)).tolist(), -told)


def test_more_than_was_asked_for_is_an_error(harness: Harness) -> None:
    engine = harness.open()
    harness.fake.fail_transfer(Fault.MUCH, nth=2)
    check_read(harness, engine.read(*apart(harness)).tolist(), -errno.EIO)


@pytest.mark.parametrize(
    ("moved", "read", "written"),
    [(PAGE, 2 * PAGE, 2 * PAGE), (0, 0, -errno.EIO), (100, 100, -errno.EIO)],
)
def test_a_part_is_continued_unless_it_is_the_end(
    harness: Harness, moved: int, read: int, written: int
) -> None:
    """A short transfer is continued, except a read that ends within a page: the file's end."""
    engine = harness.open()
    harness.fake.fail_transfer(Fault.CUT, moved, nth=3)
    results = engine.read(*apart(harness)).tolist()
    assert sorted(results) == sorted([*[2 * PAGE] * 9, read])
    harness.fake.fail_transfer(Fault.CUT, moved, nth=3)
    results = engine.write(*apart(harness)).tolist()
    assert sorted(results) == sorted([*[2 * PAGE] * 9, written])


def test_memory_that_is_not_registered_is_never_handed_on(harness: Harness) -> None:
    engine = harness.open()
    offsets, addresses, sizes = harness.batch(
        (0, 0, 1), (1, 2 * harness.num_pages - 1, 2), (3, 2, 1)
    )
    before = harness.fake.num_transfers
    assert engine.read(offsets, addresses, sizes).tolist() == [PAGE, -errno.EFAULT, PAGE]
    assert engine.write(offsets[1:2], addresses[1:2], sizes[1:2]).tolist() == [-errno.EFAULT]
    assert harness.fake.num_transfers - before == 2


def test_nobody_can_check_what_no_processor_sees(harness: Harness) -> None:
    with pytest.raises(TierError, match="through host memory"):
        harness.open().read_checked(*apart(harness), 1)


# -- batches ---------------------------------------------------------------------------------------


def test_events_that_cant_be_had_are_asked_for_again(
    batches: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_queue, "LOOK_S", 0.001)
    engine = batches.open()
    batches.fake.fail_call("cuFileBatchIOGetStatus", 5041)
    check_read(batches, engine.read(*apart(batches)).tolist())


@pytest.mark.parametrize(("code", "told"), [(5022, errno.EINVAL), (5037, errno.EIO)])
def test_a_batch_that_is_refused_costs_its_pieces(batches: Harness, code: int, told: int) -> None:
    engine = batches.open()
    batches.fake.fail_call("cuFileBatchIOSubmit", code)
    assert engine.read(*apart(batches)).tolist() == [-told] * 10
    assert not engine.is_given_up
    check_read(batches, engine.read(*apart(batches)).tolist())


def test_more_pieces_than_a_batch_has_room_for(batches: Harness) -> None:
    engine = batches.open()
    batch = batches.batch(*((2 * (at % 32), at, 1) for at in range(128)))
    assert engine.read(*batch).tolist() == [PAGE] * 128
    for at in range(128):
        assert np.array_equal(batches.in_memory(at, 1), batches.page(2 * (at % 32)))


@pytest.mark.parametrize("name", BATCHES)
def test_no_batch_waits_for_buffers_that_are_not_there(name: str, tmp_path: Path) -> None:
    """Transfers go through host memory. The fake records requests for more buffers than exist."""
    with direct_harness(name, tmp_path) as harness:
        harness.fake.reset_storage(is_bounced=True)
        engine = harness.open()
        batch = harness.batch(*((at % 64, at, 1) for at in range(120)))
        writer = threading.Thread(target=lambda: engine.write(*harness.batch((63, 127, 1))))
        writer.start()
        assert engine.read(*batch).tolist() == [PAGE] * 120
        writer.join()


# -- deadlines -------------------------------------------------------------------------------------


def test_what_has_not_begun_at_the_deadline_is_cancelled(
    batches: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled batch ends, and the next one is a new batch."""
    engine = batches.open()
    batches.fake.hold_storage()
    assert engine.read(*apart(batches), 0.05).tolist() == [-errno.ECANCELED] * 10
    assert batches.fake.num_moving == 0, "the driver has let go of the memory"
    batches.fake.let_storage_go()
    assert not batches.in_memory(0, 30).any(), "a late transfer reached the memory"
    check_read(batches, engine.read(*apart(batches), 60.0).tolist())
    assert not engine.is_given_up
    assert batches.fake.count("cuFileBatchIOSetUp") == 3


class Waiting:
    """A read that waits for its driver, on a thread of its own."""

    def __init__(self, read: Callable[[], Int64s]) -> None:
        self.results: list[int] = []
        self.thread = threading.Thread(target=lambda: self.results.extend(read().tolist()))
        self.thread.start()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("cancel", [Cancel.IGNORED, Cancel.REFUSED])
def test_a_driver_that_does_not_let_go_keeps_the_memory(
    name: str, cancel: Cancel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call returns only when the driver has finished; the engine cannot be used afterwards."""
    monkeypatch.setattr(direct, "GRACE_S", 0.05)
    monkeypatch.setattr(direct, "_given_up", [])
    monkeypatch.setattr(file_library, "_opened", {})
    harness = Harness(name, tmp_path)
    engine = harness.open()
    harness.fake.cancels(cancel)
    harness.fake.hold_storage()
    waiting = Waiting(lambda: engine.read(*apart(harness), 0.05))
    wait_until(lambda: engine.is_given_up)
    assert harness.fake.num_moving > 0
    assert waiting.thread.is_alive(), "whoever waits for it keeps its memory"
    assert engine.read(*apart(harness), 60.0).tolist() == [-errno.EIO] * 10, "nothing else is begun"
    assert engine.write(*apart(harness)).tolist() == [-errno.EIO] * 10
    assert "given up" in engine.findings()[0].note
    engine.close()
    assert engine in direct._given_up, "its memory is referenced as long as the process lives"
    assert any("file" in leak for leak in harness.fake.storage_leaks), "nothing was given back"
    harness.fake.let_storage_go()
    waiting.thread.join()
    assert set(waiting.results) <= {2 * PAGE, -errno.ECANCELED}
    assert 2 * PAGE in waiting.results, "what the driver did in the end is told as it is"
    assert engine.is_given_up
    assert harness.fake.violations == []
    harness.close()


def test_a_batch_of_which_a_part_may_have_begun_is_waited_for(
    batches: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_given_up", [])
    monkeypatch.setattr(file_library, "_opened", {})
    engine = batches.open()
    batches.fake.fail_submit(5035)
    batches.fake.cancels(Cancel.IGNORED)
    check_read(batches, engine.read(*apart(batches)).tolist())
    assert batches.fake.num_moving == 0
    assert engine.is_given_up
    batches.fake.reset_storage()  # what an engine that was given up keeps is kept on purpose


# -- compute ---------------------------------------------------------------------------------------


@pytest.fixture(params=WAYS)
def computing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Yield a harness whose compute stream is held."""
    stream: list[int] = []
    harness = Harness(request.param, tmp_path, compute=lambda: stream[0])
    stream.append(harness.fake.compute_stream())
    harness.fake.hold()
    harness.fake.fill(harness.memory.address, 4 * PAGE, 9, stream[0])
    yield harness
    harness.fake.release()
    harness.close()


def test_what_is_still_computed_is_not_stored(computing: Harness) -> None:
    """A transfer waits for no stream, so the engine has to."""
    engine = computing.open()
    engine.hold_for(computing.device.fence())
    batch = computing.batch((0, 0, 4))
    for move in (engine.write, engine.read):
        assert move(*batch, 0.02).tolist() == [-errno.ECANCELED]
    assert computing.fake.num_transfers == 0
    waiting = Waiting(lambda: engine.write(*batch))
    computing.fake.release()
    waiting.thread.join()
    assert waiting.results == [4 * PAGE]
    assert set(computing.in_file(0, 4).tolist()) == {9}
    assert engine.read(*batch, 60.0).tolist() == [4 * PAGE]
    assert computing.fake.violations == []


def test_the_fake_notices_who_does_not_wait(computing: Harness) -> None:
    """The control of the test above."""
    engine = computing.open()
    assert engine.write(*computing.batch((0, 0, 4))).tolist() == [4 * PAGE]
    assert any("not done with" in line for line in computing.fake.violations)


def test_nothing_is_stored_of_compute_that_failed(computing: Harness) -> None:
    engine = computing.open()
    engine.hold_for(computing.device.fence())
    computing.fake.lose_device(719)
    assert engine.write(*computing.batch((0, 0, 4)), 60.0).tolist() == [-errno.EIO]
    assert engine.read(*computing.batch((0, 0, 4))).tolist() == [-errno.EIO]
    assert computing.fake.num_transfers == 0
    assert np.array_equal(computing.in_file(0, 64), computing.content)


# -- opening and closing ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["DriverOpen", "HandleRegister", "BufRegister", "BatchIOSetUp"])
def test_what_cant_be_opened_says_so_and_leaves_nothing(harness: Harness, call: str) -> None:
    name = f"{harness.prefix}{call}"
    if not hasattr(harness.fake.library, name) or (
        call == "BatchIOSetUp" and harness.way.value != "batch"
    ):
        pytest.skip("not with this library")
    harness.fake.fail_call(name, 5033)
    with pytest.raises(TierError, match=f"{name} answered 5033.*set up"):
        harness.open()
    assert harness.fake.storage_leaks == []
    assert harness.open().read(*apart(harness)).tolist() == [2 * PAGE] * 10, "the next one opens"


def test_files_without_direct_io_are_refused(harness: Harness) -> None:
    fd = os.open(harness.path, os.O_RDWR)
    with pytest.raises(TierError, match="without O_DIRECT"):
        harness.open(fd)
    os.close(fd)


def test_a_missing_library_is_named_with_the_way_to_name_another(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.fake, "path", Path("/no/such.so"))
    told = f"/no/such.so is not on this machine.*{harness.fake.library_variable}"
    with pytest.raises(TierError, match=told):
        harness.open()


def test_more_memory_than_may_be_pinned_is_asked_for(tmp_path: Path) -> None:
    for name in ("cufile120-vectors", "hipfile03-single"):
        with direct_harness(name, tmp_path) as harness:
            harness.fake.limit_pinned(16)
            assert harness.open().read(*apart(harness)).tolist() == [2 * PAGE] * 10
            assert harness.fake.count(f"{harness.prefix}DriverSetMaxPinnedMemSize") == 1
    with direct_harness("cufile120-vectors", tmp_path) as harness:
        harness.fake.limit_pinned(16)
        harness.fake.fail_call("cuFileDriverSetMaxPinnedMemSize", 5002)
        with pytest.raises(TierError, match="can't be pinned"):
            harness.open()


def test_files_share_the_driver_and_the_memory(harness: Harness, tmp_path: Path) -> None:
    """A block may be cut over several disks, and the pool is registered once."""
    other_path = tmp_path / "other"
    other_path.write_bytes(bytes(64 * PAGE))
    other_fd = os.open(other_path, os.O_RDWR | os.O_DIRECT)
    first, second = harness.open(), harness.open(other_fd)
    assert harness.fake.count(f"{harness.prefix}DriverOpen") == 1
    assert harness.fake.count(f"{harness.prefix}BufRegister") == (harness.fake.vendor != "ascend")
    batch = harness.batch((5, 0, 1))
    assert first.read(*batch).tolist() == [PAGE]
    assert np.array_equal(harness.in_memory(0, 1), harness.page(5))
    first.close()
    assert second.read(*batch).tolist() == [PAGE]
    assert not harness.in_memory(0, 1).any()
    second.close()
    os.close(other_fd)


def test_a_driver_that_somebody_else_opened_stays_open(harness: Harness) -> None:
    assert getattr(harness.fake.library, f"{harness.prefix}DriverOpen")() == 0
    engine = harness.open()
    assert engine.read(*apart(harness)).tolist() == [2 * PAGE] * 10
    engine.close()
    assert harness.fake.storage_leaks == ["an open driver"]
    close = "DriverClose_v2" if harness.fake.vendor == "cuda" else "DriverClose"
    getattr(harness.fake.library, f"{harness.prefix}{close}")()


def test_a_forked_child_gives_nothing_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pid = harness.open(), os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr("kvtier.core.system.process.os.getpid", lambda: pid + 1)
        with pytest.raises(Closed, match="forked"):
            engine.read(*apart(harness))
        before = harness.fake.storage_leaks
        engine.close()
        assert harness.fake.storage_leaks == before
    engine._is_closed = False  # of the parent's copy, which knows nothing of that


def test_nothing_is_left_of_ten_thousand_transfers(harness: Harness) -> None:
    before, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    harness.fake.reset_storage(3, 0, 10)
    for seed in range(20):
        engine, random = harness.open(), np.random.default_rng(seed)
        for move in (engine.write, engine.read) * 5:
            offsets, places = random.permutation(64)[:50], random.permutation(128)[:50]
            batch = harness.batch(*zip(offsets.tolist(), places.tolist(), [1] * 50, strict=True))
            assert move(*batch, 60.0).tolist() == [PAGE] * 50
        engine.close()
        assert harness.fake.storage_leaks == []
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == fds
    for made, undone in (("HandleRegister", "HandleDeregister"), ("BufRegister", "BufDeregister")):
        assert harness.fake.count(harness.prefix + made) == harness.fake.count(
            harness.prefix + undone
        )
