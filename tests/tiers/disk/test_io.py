"""Every I/O engine, by the same rules: bytes, ends of files, errors, deadlines."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import Closed, TierError
from kvtier.core.hot import crc32c_rows
from kvtier.core.types import IoKind
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io import IoEngine, open_engine
from kvtier.tiers.disk.io.base import runs

PAGE = 4096
FILE_PAGES = 2000

Batch = tuple[Int64s, Uint64s, Int64s]
Open = Callable[..., IoEngine]


class Place:
    """A file of known bytes, and memory for its blocks."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.memory = host_memory((FILE_PAGES + 1) * PAGE)
        shift = -self.memory.address % PAGE
        self.address = self.memory.address + shift
        self.bytes = memory_bytes(self.memory)[shift : shift + FILE_PAGES * PAGE]
        self.content = np.random.default_rng(5).integers(0, 256, FILE_PAGES * PAGE, np.uint8)
        path.write_bytes(self.content.tobytes())
        self.fd = os.open(path, flags)

    def batch(self, *blocks: tuple[int, int, int]) -> Batch:
        """Return a batch of (offset in the file, place in memory, size), in pages."""
        offsets, places, sizes = np.array(blocks, np.int64).reshape(-1, 3).T * PAGE
        return offsets.copy(), places.astype(np.uint64) + np.uint64(self.address), sizes.copy()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    yield made
    os.close(made.fd)


@pytest.fixture(params=[IoKind.PREADV, IoKind.URING])
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    with ExitStack() as stack:

        def make(fd: int, *arguments: object, **named: object) -> IoEngine:
            try:
                engine = open_engine(fd, request.param, *arguments, **named)  # type: ignore[arg-type]
            except TierError as error:
                pytest.skip(str(error))
            stack.callback(engine.close)
            return engine

        yield make


def shuffled(seed: int, num_pages: int, longest: int) -> list[tuple[int, int, int]]:
    """Return blocks that cover the file once, each at a random place in memory."""
    rng = random.Random(seed)
    sizes: list[int] = []
    while (left := num_pages - sum(sizes)) > 0:
        sizes.append(min(left, rng.randrange(1, longest)))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    order = rng.sample(range(len(sizes)), len(sizes))
    to = dict(zip(order, np.cumsum([0, *(sizes[n] for n in order[:-1])]).tolist(), strict=True))
    blocks = [(starts[n], to[n], sizes[n]) for n in range(len(sizes))]
    return rng.sample(blocks, len(blocks))


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize(("queue_depth", "longest"), [(1, 9), (4, 2), (32, 700), (64, 5)])
def test_bytes_are_right_both_ways(
    place: Place, opened: Open, queue_depth: int, longest: int, is_registered: bool
) -> None:
    engine = opened(place.fd, [place.memory] if is_registered else [], queue_depth)
    blocks = shuffled(queue_depth, FILE_PAGES, longest)
    batch = place.batch(*blocks)
    assert engine.read(*batch).tolist() == batch[2].tolist()
    for offset, to, size in blocks:
        there = place.bytes[to * PAGE : (to + size) * PAGE]
        assert np.array_equal(there, place.content[offset * PAGE : (offset + size) * PAGE])
    place.bytes[:] = place.bytes[::-1].copy()
    assert engine.write(*batch).tolist() == batch[2].tolist()
    engine.sync()
    written = np.frombuffer(place.path.read_bytes(), np.uint8)
    for offset, to, size in blocks:
        there = place.bytes[to * PAGE : (to + size) * PAGE]
        assert np.array_equal(there, written[offset * PAGE : (offset + size) * PAGE])


def scattered(seed: int, longest: int) -> list[tuple[int, int, int]]:
    """Neighbours in the file, in its order, that lie anywhere in memory; some begin a new run."""
    blocks = sorted(shuffled(seed, FILE_PAGES, longest))
    return [block for at, block in enumerate(blocks) if at % 17 != 5]


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("fuse_pages", [0, 1, 3, 64])
@pytest.mark.parametrize("longest", [2, 6, 300])
def test_neighbours_in_the_file_may_lie_anywhere_in_memory(
    place: Place,
    opened: Open,
    longest: int,
    fuse_pages: int,
    is_registered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("uring", "preadv"):
        monkeypatch.setattr(f"kvtier.tiers.disk.io.{name}.FUSED_BYTES", fuse_pages * PAGE)
    engine = opened(place.fd, [place.memory] if is_registered else [], 8)
    blocks = scattered(longest, longest)
    batch = place.batch(*blocks)
    place.bytes[:] = 0
    done, crcs = engine.read_checked(*batch, FILE_PAGES * PAGE)
    assert done.tolist() == batch[2].tolist()
    expected = np.zeros_like(place.content)
    for (offset, to, size), crc in zip(blocks, crcs.tolist(), strict=True):
        content = place.content[offset * PAGE : (offset + size) * PAGE]
        expected[to * PAGE : (to + size) * PAGE] = content
        assert crc == crc32c_rows(content[None])[0]
    assert np.array_equal(place.bytes, expected), "nothing else has changed either"
    place.bytes[:] = place.bytes[::-1].copy()
    before = place.content.copy()
    assert engine.write(*batch).tolist() == batch[2].tolist()
    for offset, to, size in blocks:
        there = place.bytes[to * PAGE : (to + size) * PAGE]
        before[offset * PAGE : (offset + size) * PAGE] = there
    assert np.array_equal(np.frombuffer(place.path.read_bytes(), np.uint8), before)


def test_end_of_the_file_cuts_neighbours_where_it_is(place: Place, opened: Open) -> None:
    engine = opened(place.fd, [place.memory])
    end = FILE_PAGES
    batch = place.batch(*((end - 5 + 2 * n, 7 * n, 2) for n in range(5)))
    assert engine.read(*batch).tolist() == [2 * PAGE, 2 * PAGE, PAGE, 0, 0]


def test_an_error_among_neighbours_is_told_of_the_one_that_it_is_about(
    place: Place, opened: Open
) -> None:
    engine = opened(place.fd, [place.memory], 4)
    if engine.name == "preadv":
        pytest.skip("a wrong address ends the process")
    offsets, addresses, sizes = place.batch(*((n, 3 * n, 1) for n in range(40)))
    addresses[[7, 30]] = PAGE
    place.bytes[:] = 0
    results = engine.read(offsets, addresses, sizes).tolist()
    assert [at for at, result in enumerate(results) if result == -errno.EFAULT] == [7, 30]
    assert results.count(PAGE) == 38
    for at in set(range(40)) - {7, 30}:
        there = place.bytes[3 * at * PAGE : (3 * at + 1) * PAGE]
        assert np.array_equal(there, place.content[at * PAGE : (at + 1) * PAGE])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_plain_calls_that_fail_are_made_again_one_by_one(
    place: Place, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def fail_for_one(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= 3 * PAGE < offset + sum(map(len, buffers)):
            raise OSError(code, "the test wants it")
        return real(fd, buffers, offset)

    engine = open_engine(place.fd, IoKind.PREADV)
    monkeypatch.setattr("kvtier.tiers.disk.io.preadv.os.preadv", fail_for_one)
    batch = place.batch(*((n, 2 * n, 1) for n in range(6)))
    assert engine.read(*batch).tolist() == [PAGE] * 3 + [-code] + [PAGE] * 2
    engine.close()


@given(
    blocks=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40),
    fuse_bytes=st.integers(0, 12),
    max_bytes=st.integers(1, 30),
    max_entries=st.integers(1, 9),
)
def test_runs_hold_every_block_once_and_are_as_long_as_they_may_be(
    blocks: list[tuple[bool, int]], fuse_bytes: int, max_bytes: int, max_entries: int
) -> None:
    """blocks: whether there is a gap before each, and its size."""
    sizes = np.array([size for _, size in blocks], np.int64)
    gaps = np.array([gap for gap, _ in blocks], np.int64)
    offsets = np.cumsum(sizes + gaps) - sizes
    made = list(runs(offsets, sizes, fuse_bytes, max_bytes, max_entries))
    assert [at for run in made for at in range(len(blocks))[run]] == list(range(len(blocks)))
    for run in made:
        assert run.stop - run.start in range(1, max_entries + 1)
        if run.stop - run.start > 1:
            assert sizes[run].sum() <= max_bytes
            assert sizes[run].min() > 0
            assert sizes[run].max() <= fuse_bytes
            assert not gaps[run][1:].any()
    for before, after in pairwise(made):
        ends = sizes[[before.stop - 1, after.start]]
        is_full = before.stop - before.start == max_entries
        is_heavy = sizes[before].sum() + sizes[after.start] > max_bytes
        cannot_join = gaps[after.start] or not ends.all() or (ends > fuse_bytes).any()
        assert is_full or is_heavy or cannot_join, "it had fitted"


def test_no_blocks_and_empty_blocks_are_nothing(place: Place, opened: Open) -> None:
    engine = opened(place.fd)
    assert engine.read(*place.batch()).tolist() == []
    assert engine.read(*place.batch((0, 0, 0), (1, 1, 0))).tolist() == [0, 0]


@pytest.mark.parametrize("num_pages", [1, 600])
def test_end_of_the_file_is_told_per_block(place: Place, opened: Open, num_pages: int) -> None:
    engine = opened(place.fd)
    end = FILE_PAGES
    batch = place.batch((end - num_pages, 0, num_pages + 3), (end + 5, 900, 2), (3, 1000, 4))
    assert engine.read(*batch).tolist() == [num_pages * PAGE, 0, 4 * PAGE]


def test_errors_are_told_per_block(tmp_path: Path, opened: Open) -> None:
    """Every write to a read-only file fails, without an exception."""
    place = Place(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    engine = opened(place.fd, [place.memory])
    batch = place.batch((0, 0, 1), (7, 3, 400))
    assert engine.write(*batch).tolist() == [-errno.EBADF] * 2
    assert engine.read(*batch).tolist() == batch[2].tolist()
    engine.close()
    os.close(place.fd)


def test_memory_that_is_not_there_fails_its_block_only(place: Place, opened: Open) -> None:
    engine = opened(place.fd)
    offsets, addresses, sizes = place.batch((0, 0, 1), (1, 1, 1), (2, 2, 1))
    if engine.name == "preadv":
        pytest.skip("a wrong address ends the process")
    addresses[1] = PAGE
    assert engine.read(offsets, addresses, sizes).tolist() == [PAGE, -errno.EFAULT, PAGE]


def test_nothing_is_begun_after_the_deadline(place: Place, opened: Open) -> None:
    engine = opened(place.fd)
    batch = place.batch(*((n, n, 1) for n in range(100)))
    place.bytes[:] = 7
    assert set(engine.write(*batch, 0.0).tolist()) == {-errno.ECANCELED}
    assert set(engine.read(*batch, 0.0).tolist()) == {-errno.ECANCELED}
    assert (place.bytes == 7).all()
    assert np.array_equal(np.frombuffer(place.path.read_bytes(), np.uint8), place.content)
    assert engine.read(*batch, 60.0).tolist() == [PAGE] * 100, "the next batch is served"


@pytest.mark.parametrize("num_checked", [1, 100, PAGE - 1, PAGE, 3 * PAGE])
@pytest.mark.parametrize("piece_pages", [1, 64])
def test_checksums_come_with_the_blocks(
    place: Place, opened: Open, num_checked: int, piece_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums of every block's beginning, in any order and pieces of arrival."""
    monkeypatch.setattr("kvtier.tiers.disk.io.uring.PIECE_BYTES", piece_pages * PAGE)
    engine = opened(place.fd, [place.memory], 8)
    blocks = [(3 * at, 3 * (399 - at), 3) for at in range(400)]
    offsets, addresses, sizes = place.batch(*blocks)
    place.bytes[:] = 0
    done, crcs = engine.read_checked(offsets, addresses, sizes, num_checked, 60.0)
    assert done.tolist() == sizes.tolist()
    rows = np.stack([place.content[at : at + num_checked] for at in offsets.tolist()])
    assert crcs.tolist() == crc32c_rows(rows).tolist()


def test_blocks_that_end_early_spoil_no_other_checksum(place: Place, opened: Open) -> None:
    engine = opened(place.fd, [place.memory], 4)
    batch = place.batch((FILE_PAGES - 1, 0, 2), (5, 2, 2), (FILE_PAGES + 9, 4, 1), (7, 6, 2))
    done, crcs = engine.read_checked(*batch, PAGE)
    assert done.tolist() == [PAGE, 2 * PAGE, 0, 2 * PAGE]
    for at, page in ((1, 5), (3, 7)):
        assert crcs[at] == crc32c_rows(place.content[None, page * PAGE : (page + 1) * PAGE])[0]


def test_a_deadline_in_the_middle_loses_no_buffer(place: Place, opened: Open) -> None:
    """At any deadline, a block is either whole or reported as cancelled."""
    engine = opened(place.fd, [place.memory], 4)
    blocks = shuffled(3, FILE_PAGES, 300)
    batch = place.batch(*blocks)
    for deadline_s in (1e-6, 1e-4, 3e-4, 1e-3, 2e-3):
        place.bytes[:] = 0
        results = engine.read(*batch, deadline_s).tolist()
        before = place.bytes.copy()
        for (offset, to, size), result in zip(blocks, results, strict=True):
            assert result in (size * PAGE, -errno.ECANCELED)
            if result > 0:
                there = place.bytes[to * PAGE : (to + size) * PAGE]
                assert np.array_equal(there, place.content[offset * PAGE : (offset + size) * PAGE])
        assert np.array_equal(before, place.bytes), "a buffer was written to after the call"


def test_what_direct_io_can_not_move_is_refused(place: Place, opened: Open) -> None:
    engine = opened(place.fd)
    for position in range(3):
        batch = place.batch((1, 1, 1))
        batch[position][0] += batch[position].dtype.type(512)
        with pytest.raises(AssertionError, match="4096"):
            engine.read(*batch)


def test_files_without_direct_io_work(tmp_path: Path, opened: Open) -> None:
    place = Place(tmp_path / "file", os.O_RDWR)
    engine = opened(place.fd)
    offsets, addresses, sizes = place.batch((3, 1, 2))
    assert engine.read(offsets + 5, addresses, sizes - 9).tolist() == [2 * PAGE - 9]
    there = place.bytes[PAGE : 3 * PAGE - 9]
    assert np.array_equal(there, place.content[3 * PAGE + 5 : 5 * PAGE - 4])
    engine.close()
    os.close(place.fd)


def test_one_reads_while_another_writes(place: Place, opened: Open) -> None:
    engine = opened(place.fd, [place.memory])
    reads = place.batch(*((n, n, 1) for n in range(1000)))
    writes = place.batch(*((n, n, 1) for n in range(1000, 2000)))
    place.bytes[1000 * PAGE :] = 9
    results: list[list[int]] = []

    def write() -> None:
        results.extend(engine.write(*writes).tolist() for _ in range(5))

    writer = Thread(target=write)
    writer.start()
    for _ in range(5):
        assert engine.read(*reads).tolist() == [PAGE] * 1000
    writer.join()
    assert results == [[PAGE] * 1000] * 5
    assert np.array_equal(place.bytes[: 1000 * PAGE], place.content[: 1000 * PAGE])
    assert set(place.path.read_bytes()[1000 * PAGE :]) == {9}


def test_closed_engine_says_so(place: Place, opened: Open) -> None:
    engine = opened(place.fd)
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.read(*place.batch((0, 0, 1)))
    with pytest.raises(Closed):
        engine.sync()


def test_findings_name_the_engine(place: Place, opened: Open) -> None:
    (finding,) = opened(place.fd).findings()
    assert finding.topic == "disk I/O"


def test_auto_falls_back_and_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.io.uring.UringRing", None)
    engine = open_engine(place.fd)
    assert engine.name == "preadv"
    assert "native core" in engine.findings()[0].note
    engine.close()
    with pytest.raises(TierError, match="native core"):
        open_engine(place.fd, IoKind.URING)


class Silent:
    """A pipe into which nothing is written: a read of it ends when the test writes."""

    def __init__(self) -> None:
        self.fd, self.inlet = os.pipe()
        self.memory = host_memory(2 * PAGE)
        self.bytes = memory_bytes(self.memory)
        self.bytes[:] = 7

    def batch(self, num: int) -> Batch:
        numbers = np.arange(num)
        addresses = numbers.astype(np.uint64) * np.uint64(8) + np.uint64(self.memory.address)
        return np.zeros(num, np.int64), addresses, np.full(num, 8, np.int64)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.inlet)


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.close()


@pytest.mark.parametrize("num_blocks", [1, 40])
@pytest.mark.parametrize("is_registered", [True, False])
def test_reads_of_a_device_that_hangs_are_cancelled_at_the_deadline(
    silent: Silent, is_registered: bool, num_blocks: int
) -> None:
    """The kernel releases the memory: bytes that arrive later do not reach it."""
    try:
        engine = open_engine(silent.fd, IoKind.URING, [silent.memory] if is_registered else [], 8)
    except TierError as error:
        pytest.skip(str(error))
    results = engine.read(*silent.batch(num_blocks), 0.02).tolist()
    assert results == [-errno.ECANCELED] * num_blocks
    os.write(silent.inlet, bytes(range(200)))
    assert (silent.bytes == 7).all(), "a late read reached the memory"
    assert engine.read(*silent.batch(1), 60.0).tolist() == [8], "the next read is served"
    assert silent.bytes[:9].tolist() == [*range(8), 7], "and nothing was taken by a cancelled one"
    engine.close()


def test_a_call_that_cannot_be_cancelled_is_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may still write to the memory, so the call returns after the deadline."""
    engine = open_engine(place.fd, IoKind.PREADV)
    began, may_end = Event(), Event()
    real = os.preadv

    def hang(*arguments: Any) -> int:
        began.set()
        assert may_end.wait(60)
        return real(*arguments)

    monkeypatch.setattr("kvtier.tiers.disk.io.preadv.os.preadv", hang)
    results: list[int] = []
    batch = place.batch(*((2 * n, n, 1) for n in range(100)))  # no neighbours: a call each
    reader = Thread(target=lambda: results.extend(engine.read(*batch, 0.5).tolist()))
    reader.start()
    assert began.wait(60)
    reader.join(0.6)  # beyond the deadline
    assert reader.is_alive()
    may_end.set()
    reader.join()
    assert set(results) == {PAGE, -errno.ECANCELED}
    assert results.count(PAGE) <= 8, "nothing was begun after the deadline"
    engine.close()
