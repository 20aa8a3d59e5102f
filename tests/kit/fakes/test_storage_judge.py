"""The fake file libraries notice every call that hardware might punish."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint, c_void_p
from pathlib import Path

import pytest

from kvtier.devices.driver_device import DriverDevice
from kvtier.tiers.disk.io.batch_queue import BatchEvent, BatchRequest, Timespec
from kvtier.tiers.disk.io.file_library import FileLibrary, Vector
from kvtier.tiers.disk.io.vendors import VENDORS
from tests.devices.drivers import environment, make_device
from tests.kit.fakes.storage import STORAGE, Cancel, StorageFake

PAGE = 4096
NUM_PAGES = 256
DONE = PAGE


class CuFile:
    """An open cuFile 1.20 with a registered file and registered memory, called as it is called."""

    def __init__(self, folder: Path, is_bounced: bool = False) -> None:
        self.fake = StorageFake("cufile120")
        self.fake.reset_storage(is_bounced=is_bounced)
        self.device: DriverDevice = make_device(self.fake)
        self.device.driver.use()
        with environment(KVTIER_CUFILE_LIBRARY=str(self.fake.path)):
            self.calls = FileLibrary(VENDORS["cufile"])
        assert self.calls.code("DriverOpen") == 0
        self.path = folder / "file"
        self.path.write_bytes(bytes(NUM_PAGES * PAGE))
        self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.file = self.calls.register_file(self.fd)
        self.base = self.fake.allocate(NUM_PAGES * PAGE)
        assert self.calls.code("BufRegister", self.base, NUM_PAGES * PAGE // 2, 0) == 0
        self.requests = (BatchRequest * 128)()

    def read(self, at: int = 0, size: int = PAGE, offset: int = 0, base: int | None = None) -> int:
        base = self.base if base is None else base
        return self.calls.move(False, self.file, base, self.base + at, size, offset)

    def read_later(self) -> threading.Thread:
        """Submit a read that begins when the fake is released."""

        def read() -> None:
            self.device.driver.use()
            self.read()

        self.fake.hold_storage()
        thread = threading.Thread(target=read)
        thread.start()
        while not self.fake.num_moving:
            pass
        return thread

    def batch(self, room: int = 128) -> c_void_p:
        made = c_void_p()
        assert self.calls.code("BatchIOSetUp", byref(made), room) == 0
        return made

    def submit(self, batch: c_void_p, num: int = 1) -> int:
        for at in range(num):
            self.requests[at] = BatchRequest(
                1, self.base, at * PAGE, at * PAGE, PAGE, self.file, 0, at + 1
            )
        return self.calls.code("BatchIOSubmit", batch, num, self.requests, 0)

    def events(
        self, batch: c_void_p, num: int = 1, seconds: float | None = 10.0
    ) -> list[BatchEvent]:
        events, count = (BatchEvent * num)(), c_uint(num)
        wait = None if seconds is None else byref(Timespec.of(seconds))
        assert self.calls.code("BatchIOGetStatus", batch, num, byref(count), events, wait) == 0
        return events[: count.value]

    def violations(self) -> str:
        return "\n".join(self.fake.violations)


@pytest.fixture
def cufile(tmp_path: Path) -> Iterator[CuFile]:
    made = CuFile(tmp_path)
    yield made
    made.fake.let_storage_go()
    os.close(made.fd)


def test_who_does_all_as_it_should_is_not_blamed(cufile: CuFile) -> None:
    assert cufile.read() == DONE
    assert cufile.calls.move(True, cufile.file, cufile.base, cufile.base + PAGE, PAGE, 0) == DONE
    vectors = (Vector * 2)(Vector(cufile.base, PAGE), Vector(cufile.base + 8 * PAGE, 2 * PAGE))
    assert cufile.calls.move_vectors(False, cufile.file, vectors, 3 * PAGE, 0) == 3 * PAGE
    batch = cufile.batch()
    assert cufile.submit(batch, 64) == 0
    left = 64
    while left:
        ended = [event for event in cufile.events(batch, left) if event.status == 16]
        assert all(each.moved == PAGE for each in ended)
        left -= len(ended)
    cufile.calls.tell("BatchIODestroy", batch)
    assert cufile.calls.code("BufDeregister", cufile.base) == 0
    cufile.calls.deregister_file(cufile.file)
    assert cufile.calls.code("DriverClose_v2") == 0
    assert cufile.fake.violations == []
    assert cufile.fake.storage_leaks == []


def _without_accelerator(cufile: CuFile) -> None:
    thread = threading.Thread(target=cufile.read)
    thread.start()
    thread.join()


def _without_driver(cufile: CuFile) -> bool:
    cufile.fake.reset_storage()
    return cufile.read() < 0


def _after_it_was_let_go(cufile: CuFile) -> bool:
    cufile.calls.deregister_file(cufile.file)
    return cufile.read() < 0


def _let_go_twice(cufile: CuFile) -> None:
    for _ in range(2):
        cufile.calls.deregister_file(cufile.file)


def _closed_file(cufile: CuFile) -> None:
    other = os.dup(cufile.fd)
    os.close(cufile.fd)
    cufile.calls.deregister_file(cufile.file)
    os.dup2(other, cufile.fd)
    os.close(other)


def _odd_vector(cufile: CuFile) -> None:
    vectors = (Vector * 2)(Vector(cufile.base, PAGE), Vector(cufile.base + 512, PAGE))
    assert cufile.calls.move_vectors(False, cufile.file, vectors, 2 * PAGE, 0) < 0


def _let_go_early(cufile: CuFile) -> None:
    thread = cufile.read_later()
    cufile.calls.deregister_file(cufile.file)
    cufile.fake.let_storage_go()
    thread.join()


def _memory_let_go_early(cufile: CuFile) -> None:
    thread = cufile.read_later()
    cufile.calls.code("BufDeregister", cufile.base)
    cufile.fake.let_storage_go()
    thread.join()


def _freed_early(cufile: CuFile) -> None:
    thread = cufile.read_later()
    cufile.fake.free(cufile.base)
    cufile.fake.let_storage_go()
    thread.join()


def _same_bytes(cufile: CuFile) -> None:
    thread = cufile.read_later()
    batch = cufile.batch()
    cufile.submit(batch)
    cufile.fake.let_storage_go()
    thread.join()
    cufile.events(batch)


def _stream_meanwhile(cufile: CuFile) -> None:
    thread = cufile.read_later()
    cufile.fake.fill(cufile.base, PAGE, 1)
    cufile.fake.let_storage_go()
    thread.join()


def _destroyed_early(cufile: CuFile) -> None:
    batch = cufile.batch()
    cufile.fake.hold_storage()
    cufile.submit(batch)
    cufile.calls.tell("BatchIODestroy", batch)


def _submitted_early(cufile: CuFile) -> None:
    batch = cufile.batch()
    cufile.fake.hold_storage()
    cufile.submit(batch)
    cufile.submit(batch)


def _changed_request(cufile: CuFile) -> None:
    batch = cufile.batch()
    cufile.fake.hold_storage()
    cufile.submit(batch)
    cufile.requests[0].size = 2 * PAGE
    cufile.fake.let_storage_go()
    cufile.events(batch)


def _destroyed_twice(cufile: CuFile) -> None:
    batch = cufile.batch()
    for _ in range(2):
        cufile.calls.tell("BatchIODestroy", batch)


def _endless_wait(cufile: CuFile) -> None:
    batch = cufile.batch()
    cufile.submit(batch)
    cufile.events(batch, seconds=None)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (_without_driver, "without a driver"),
        (_without_accelerator, "thread without the accelerator"),
        (_after_it_was_let_go, "a transfer of a file that is not registered"),
        (_let_go_twice, "let go that is not registered"),
        (
            lambda it: [it.calls.code("BufDeregister", it.base) for _ in range(2)][1] != 0,
            "memory was let go that is not registered",
        ),
        (_closed_file, "closed before it was let go"),
        (lambda it: it.read(base=it.base + PAGE, at=PAGE) < 0, "of memory that is not registered"),
        (
            lambda it: it.read(at=(NUM_PAGES // 2 - 1) * PAGE, size=2 * PAGE) < 0,
            "beyond the registered memory",
        ),
        (lambda it: it.read(at=512) < 0, "not of whole pages"),
        (lambda it: it.read(size=512) < 0, "not of whole pages"),
        (lambda it: it.read(offset=512) < 0, "not of whole pages"),
        (_odd_vector, "not of whole pages"),
        (_let_go_early, "a file was let go while bytes moved"),
        (_memory_let_go_early, "memory was let go while bytes moved"),
        (_freed_early, "freed while a copy of it was pending"),
        (_same_bytes, "the same bytes twice"),
        (_stream_meanwhile, "a stream touches bytes that storage moves"),
        (_destroyed_early, "destroyed while bytes moved"),
        (_destroyed_twice, "not there was destroyed"),
        (_submitted_early, "before its events were taken"),
        (
            lambda it: it.submit(it.batch(room=4), 5) != 0,
            "more requests than the batch was made for",
        ),
        (_changed_request, "changed before they ended"),
        (_endless_wait, "without a bound"),
        (lambda it: it.calls.code("DriverClose"), "by the call of an older version"),
        (lambda it: it.calls.code("DriverClose_v2"), "before what was registered was let go"),
        (lambda it: [it.calls.code("DriverClose_v2") for _ in range(2)], "closed that is not open"),
    ],
)
def test_what_hardware_might_punish_is_written_down(
    cufile: CuFile, what: Callable[[CuFile], object], told: str
) -> None:
    assert what(cufile) is not False, "it was not refused"
    assert told in cufile.violations()


def test_a_batch_without_enough_buffers_never_ends(tmp_path: Path) -> None:
    """On the way through host memory, unless their number was set before the driver was open."""
    cufile = CuFile(tmp_path, is_bounced=True)
    batch = cufile.batch()
    assert cufile.submit(batch, 65) == 0
    ended: set[int] = set()
    for _ in range(20):
        events = cufile.events(batch, 65, 0.05)
        ended |= {event.cookie for event in events if event.status == 16}
    assert len(ended) == 64
    assert cufile.fake.num_moving == 1
    assert "more requests than there are buffers" in cufile.violations()
    os.close(cufile.fd)


@pytest.mark.parametrize(
    ("how", "status"), [(Cancel.WORKS, 8), (Cancel.IGNORED, 16), (Cancel.REFUSED, 16)]
)
def test_a_cancel_promises_nothing(cufile: CuFile, how: Cancel, status: int) -> None:
    cufile.fake.cancels(how)
    batch = cufile.batch()
    cufile.fake.hold_storage()
    cufile.submit(batch)
    assert (cufile.calls.code("BatchIOCancel", batch) != 0) == (how is Cancel.REFUSED)
    cufile.fake.let_storage_go()
    statuses = {2}
    while statuses <= {2}:
        statuses = {event.status for event in cufile.events(batch)}
    assert statuses - {2} == {status}


def test_what_is_not_given_back_is_named(cufile: CuFile) -> None:
    cufile.batch()
    assert sorted(cufile.fake.storage_leaks) == [
        "a batch", "a registered file", "an open driver", "registered memory",
    ]  # fmt: skip


@pytest.mark.parametrize("name", STORAGE)
def test_each_version_has_the_calls_that_it_should(name: str) -> None:
    library = StorageFake(name).library
    has = {
        call
        for call in (
            "cuFileReadv", "cuFileBatchIOSubmit", "cuFileSetParameterPosixPoolSlabArray",
            "hipFileRead", "hipFileBatchIOSubmit", "NdsFileRead", "NdsFileBufRegister",
        )
        if hasattr(library, call)
    }  # fmt: skip
    batches = {"cuFileBatchIOSubmit"}
    assert (
        has
        == {
            "cufile113": batches,
            "cufile115": batches | {"cuFileSetParameterPosixPoolSlabArray"},
            "cufile120": batches | {"cuFileSetParameterPosixPoolSlabArray", "cuFileReadv"},
            "hipfile03": {"hipFileRead"},
            "nds": {"NdsFileRead"},
        }[name]
    )
    assert ctypes.sizeof(BatchRequest) == 64
