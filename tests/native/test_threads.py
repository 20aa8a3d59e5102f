"""Threads that meet in the native core; ``make check-native`` runs these under ThreadSanitizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core import hot
from kvtier.core.errors import TierError
from kvtier.core.keys import Labels
from kvtier.core.types import IoKind, Slot
from kvtier.index.native_index import NativeIndex
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers.disk.io import IoEngine, open_engine

Bytes = npt.NDArray[np.uint8]

NUM_THREADS = 6
ROUNDS = 8
PAGE = 4096
MIB = 1 << 20


def all_at_once(work: Callable[[int], None], num_threads: int = NUM_THREADS) -> None:
    """``work(n)`` on thread n, ROUNDS times; all begin every round together."""
    gate = Barrier(num_threads)

    def run(n: int) -> None:
        try:
            for _ in range(ROUNDS):
                gate.wait()
                work(n)
        except BaseException:
            gate.abort()  # no thread waits for one that failed
            raise

    with ThreadPoolExecutor(num_threads) as pool:
        # The first that failed by itself, not one whose gate was broken by it.
        errors = [job.exception() for job in [pool.submit(run, n) for n in range(num_threads)]]
    for error in sorted(filter(None, errors), key=lambda each: "Broken" in type(each).__name__):
        raise error


def random_bytes(num_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def cut(memory: Bytes, num: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Addresses and sizes of ``num`` equal pieces."""
    size = memory.size // num
    starts = np.arange(num, dtype=np.uint64) * np.uint64(size) + np.uint64(memory.ctypes.data)
    return starts, np.full(num, size, np.uint64)


@pytest.mark.parametrize("num_pieces", [3, 40, 3000], ids=["long", "middle", "short"])
def test_copies_of_several_threads_share_the_workers(num_pieces: int) -> None:
    src = [random_bytes(6 * MIB, seed) for seed in range(NUM_THREADS)]
    dst = [np.zeros_like(each) for each in src]

    def copy(n: int) -> None:
        dst[n][:] = 0
        (to, sizes), (at, _) = cut(dst[n], num_pieces), cut(src[n], num_pieces)
        num_bytes = hot.copy_batch(to, at, sizes, 3)
        assert np.array_equal(dst[n][:num_bytes], src[n][:num_bytes])

    all_at_once(copy)


def test_checksums_and_copies_share_the_workers() -> None:
    src = [random_bytes(3 * MIB, seed) for seed in range(NUM_THREADS)]
    dst = [np.zeros_like(each) for each in src]
    expected = [
        [hot.crc32c(int(at), int(size)) for at, size in zip(*cut(each, 50), strict=True)]
        for each in src
    ]

    def work(n: int) -> None:
        starts, sizes = cut(src[n], 50)
        if n % 2:
            assert hot.crc32c_many(starts, sizes, 4).tolist() == expected[n]
        else:
            hot.copy_batch(cut(dst[n], 50)[0], starts, sizes, 4)
            assert hot.crc32c_many(cut(dst[n], 50)[0], sizes, 1).tolist() == expected[n]

    all_at_once(work)


def test_threads_may_read_the_same_memory() -> None:
    data = random_bytes(2 * MIB, 1)
    rows = data.reshape(-1, PAGE)
    expected = hot.crc32c_rows(rows).tolist()

    def work(_: int) -> None:
        copied = np.zeros_like(data)
        hot.copy_batch(cut(copied, 20)[0], *cut(data, 20), 2)
        assert hot.crc32c_rows(rows).tolist() == expected

    all_at_once(work)


def live(index: NativeIndex, number: int) -> None:
    """Insert, find, lease, use and name blocks of a namespace."""
    labels = Labels(random_bytes(64 * 32, 1).tobytes(), 64, 1, 0, 32)
    space = b"namespace %d" % number
    slots = [Slot(at) for at in range(number * 32, number * 32 + 32)]
    blocks, _, num_new = index.insert(space, labels, "device", slots, 1.0)
    assert num_new == len(blocks) == 32
    assert list(index.match(space, labels).blocks) == blocks
    index.lease(blocks[:5], "device")
    index.touch(blocks, 2.0)
    index.release(blocks[:5], "device")
    assert len(index.key(blocks[-1])) == 32


needs_core = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")


@needs_core
def test_every_thread_may_have_an_index() -> None:
    indexes = [NativeIndex({"device": "lru", "host": "lru"}) for _ in range(NUM_THREADS)]

    def work(n: int) -> None:
        live(indexes[n], n)
        evicted = indexes[n].evict("device", 32)
        assert len(indexes[n].forget(evicted, "device")) == 32
        indexes[n].check_invariants()
        assert len(indexes[n]) == 0

    all_at_once(work)


@needs_core
def test_calls_of_several_threads_on_one_index_follow_each_other() -> None:
    index = NativeIndex({"device": "lru", "host": "lru"})
    numbers = count()
    all_at_once(lambda n: live(index, next(numbers)))
    index.check_invariants()
    assert len(index) == 32 * NUM_THREADS * ROUNDS


class File:
    """Known bytes on disk, and memory for them, a part per thread."""

    num_pages = 256

    def __init__(self, path: Path) -> None:
        self.content = random_bytes(self.num_pages * PAGE, 3)
        path.write_bytes(self.content.tobytes())
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.memory = host_memory((NUM_THREADS * self.num_pages + 1) * PAGE)
        shift = -self.memory.address % PAGE
        self.bytes = memory_bytes(self.memory)[shift:][: NUM_THREADS * self.content.size]

    def part(self, n: int) -> Bytes:
        return self.bytes[n * self.content.size :][: self.content.size]

    def batch(
        self, n: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        addresses, sizes = cut(self.part(n), self.num_pages)
        return np.arange(self.num_pages, dtype=np.int64) * PAGE, addresses, sizes.astype(np.int64)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    made = File(tmp_path / "file")
    yield made
    os.close(made.fd)


def ring_of(file: File) -> hot.UringRing:
    if not hot.NATIVE:
        pytest.skip(f"no native core: {hot.NATIVE_REASON}")
    try:
        return hot.UringRing(file.fd, 16, MIB, True)
    except RuntimeError as error:
        pytest.skip(str(error))


def test_transfers_of_several_threads_on_one_ring_follow_each_other(file: File) -> None:
    ring = ring_of(file)

    def work(n: int) -> None:
        file.part(n)[:] = 0
        offsets, addresses, sizes = file.batch(n)
        assert ring.transfer(False, offsets, addresses, sizes, None)[0].tolist() == sizes.tolist()
        assert np.array_equal(file.part(n), file.content)

    all_at_once(work)


def test_memory_is_registered_between_transfers_of_other_threads(file: File) -> None:
    ring = ring_of(file)
    lock_limit = -12  # ENOMEM
    given: list[int] = []

    def work(n: int) -> None:
        if n == 0 and not given:
            given.append(ring.register_file())
            given.append(ring.register_buffers([(file.bytes.ctypes.data, file.bytes.size)]))
        offsets, addresses, sizes = file.batch(n)
        assert ring.transfer(False, offsets, addresses, sizes, None)[0].tolist() == sizes.tolist()
        assert np.array_equal(file.part(n), file.content)

    all_at_once(work)
    assert given[0] == 0
    assert given[1] in (0, lock_limit)


@pytest.mark.parametrize("kind", [IoKind.PREADV, IoKind.URING])
def test_one_thread_reads_while_another_writes_and_a_third_closes(file: File, kind: IoKind) -> None:
    engines: list[IoEngine] = []

    def fresh() -> IoEngine:
        try:
            return open_engine(file.fd, kind, [file.memory], 8)
        except TierError as error:
            pytest.skip(str(error))

    engines.append(fresh())
    file.part(1)[:] = file.content
    half = file.num_pages // 2
    done = Barrier(3)

    def work(n: int) -> None:
        if n < 2:
            batch: Any = [each[n * half : (n + 1) * half] for each in file.batch(n)]
            move = (engines[-1].read, engines[-1].write)[n]
            assert move(*batch).tolist() == batch[2].tolist()
        done.wait()
        if n == 2:
            engines[-1].close()
            engines.append(fresh())

    all_at_once(work, 3)
    engines[-1].close()
    assert np.array_equal(file.part(0)[: half * PAGE], file.content[: half * PAGE])
