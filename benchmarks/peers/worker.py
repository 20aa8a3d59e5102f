"""One contestant in a process and an environment of its own.

Reads a JSON object per line, {"do": "read", "batches": [[3, 17, ...], ...]}, runs it, and prints
seconds, CPU seconds and the number of wrong blocks. Needs the standard library, numpy, and the
contestant's own packages.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.lines import serve, take_stdout
from benchmarks.peers.store import BATCH, Arena, Store

STAMP_BYTES = 8
WRITE_AND_WAIT = 7
"""sync_file_range(2): wait for writes in flight, write dirty pages, wait for them."""

libc = ctypes.CDLL(None, use_errno=True)


class Contest:
    """A store, the content of its blocks, and a clock around its calls.

    Block n holds its number and then random bytes, which depend only on its position in a batch.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.arena = store, store.arena
        rng = np.random.default_rng(1)
        self.content = rng.integers(0, 256, self.arena.blocks.shape, np.uint8)

    def fill(self) -> dict[str, object]:
        """Store all blocks, in order."""
        for first in range(0, self.store.num_blocks, self.arena.batch):
            numbers = range(first, min(first + self.arena.batch, self.store.num_blocks))
            self._put(numbers)
            self.store.prepare(numbers)
            self.store.store(numbers)
            settle(self.store.files(numbers))
        return {}

    def read(self, batches: Sequence[Sequence[int]]) -> dict[str, object]:
        """Load batches that are in no page cache, and compare every byte."""
        drop(self.store.folder)
        seconds = cpu = 0.0
        wrong = num_bytes = 0
        before = bytes_from_disk()
        for numbers in batches:
            self.store.clear()
            began, cpu_before = time.perf_counter(), cpu_s()
            self.store.load(numbers)
            seconds += time.perf_counter() - began
            cpu += cpu_s() - cpu_before
            num_bytes += len(numbers) * self.arena.block_bytes
            wrong += self._num_wrong(numbers)
            self.store.release()
        from_disk = (bytes_from_disk() - before) / num_bytes
        return {"seconds": seconds, "cpu_s": cpu, "wrong": wrong, "from_disk": from_disk}

    def write(self, batches: Sequence[Sequence[int]]) -> dict[str, object]:
        """Store batches of new blocks, each until it has left the page cache.

        Each is then read back, compared and removed.
        """
        seconds = cpu = acknowledged = 0.0
        wrong = 0
        for numbers in batches:
            self._put(numbers)
            self.store.prepare(numbers)
            began, cpu_before = time.perf_counter(), cpu_s()
            self.store.store(numbers)
            acknowledged += time.perf_counter() - began
            cpu += cpu_s() - cpu_before
            files = self.store.files(numbers)
            began, cpu_before = time.perf_counter(), cpu_s()
            settle(files)
            seconds += time.perf_counter() - began
            cpu += cpu_s() - cpu_before
            self.store.clear()
            self.store.load(numbers)
            wrong += self._num_wrong(numbers)
            self.store.release()
            self.store.forget(numbers)
        return {
            "seconds": seconds + acknowledged,
            "acknowledged_s": acknowledged,
            "cpu_s": cpu,
            "wrong": wrong,
        }

    def look_up(self, batches: Sequence[Sequence[int]]) -> dict[str, object]:
        """Look up stored blocks. Return the seconds of each look-up."""
        seconds, wrong = [], 0
        for numbers in batches:
            ask = self.store.lookup(numbers)
            began = time.perf_counter()
            found = ask()
            seconds.append(time.perf_counter() - began)
            wrong += len(numbers) - found
        return {"each_s": seconds, "wrong": wrong}

    def do(self, do: str, **what: Any) -> dict[str, object]:
        """Run a command by its name."""
        found: dict[str, object] = getattr(self, do)(**what)
        return found

    def _put(self, numbers: Sequence[int]) -> None:
        for place, number in enumerate(numbers):
            self.arena.blocks[place] = self.content[number % self.arena.batch]
            self.arena.blocks[place, :STAMP_BYTES] = stamp(number)

    def _num_wrong(self, numbers: Sequence[int]) -> int:
        return sum(not self._is_right(place, number) for place, number in enumerate(numbers))

    def _is_right(self, place: int, number: int) -> bool:
        block = self.store.loaded(place)
        return (
            block.size == self.arena.block_bytes
            and np.array_equal(block[:STAMP_BYTES], stamp(number))
            and np.array_equal(
                block[STAMP_BYTES:], self.content[number % self.arena.batch, STAMP_BYTES:]
            )
        )


def stamp(number: int) -> np.ndarray:
    """Return the beginning of block ``number``."""
    return np.frombuffer(number.to_bytes(STAMP_BYTES, "little"), np.uint8)


def cpu_s() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def bytes_from_disk() -> int:
    """Return the bytes read from disk for this process, with or without page cache."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def settle(paths: Sequence[Path]) -> None:
    """Wait until the dirty pages of these files have been written.

    A file that was not buffered costs next to nothing. The file system's journal is not waited for.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            if libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), WRITE_AND_WAIT):
                os.fdatasync(fd)
        finally:
            os.close(fd)


def drop(folder: Path) -> None:
    """Drop the page cache of all files below ``folder``, which were settled."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", required=True, help="of benchmarks.peers, with open_store")
    parser.add_argument("--options", type=json.loads, required=True, help="for open_store, JSON")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--batch", type=int, default=BATCH, help="blocks at a time")
    parser.add_argument("--small-pages", action="store_true", help="memory in pages of 4 KiB")
    options = parser.parse_args()
    answers = take_stdout()
    opened = importlib.import_module(f"benchmarks.peers.{options.module}").open_store
    arena = Arena(options.block_bytes, not options.small_pages, options.batch)
    store = opened(arena, options.folder, options.num_blocks, **options.options)
    contest = Contest(store)
    serve(answers, {"version": store.version}, contest.do)
    store.close()


if __name__ == "__main__":
    main()
