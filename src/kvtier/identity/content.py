"""Hashes of all bytes of files, in parallel.

A file is cut into parts, and its digest is that of its size and its parts' digests. So one large
file keeps several threads and a fast disk as busy as many files do. Files are read, not mapped:
truncating a mapped file would kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from blake3 import blake3

from kvtier.core.system.process import give_way, num_cores

PART_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
"""Fits into a core's own cache between reading and hashing."""
MAX_THREADS = 8
"""Each thread hashes several GB/s: more threads would only wait for memory."""


class Stopped(Exception):  # noqa: N818 - asked for, no failure
    """Hashing was stopped on request."""


def num_threads() -> int:
    """Return the number of hash threads: the available cores, at most ``MAX_THREADS``."""
    return min(MAX_THREADS, num_cores())


def hash_files(
    paths: Sequence[Path], threads: int, stop: Event, is_polite: bool = False
) -> list[bytes]:
    """Return a digest of 32 bytes per file.

    is_polite: run at low priority.
    Raises ``OSError`` for a file that cannot be read or becomes shorter meanwhile, ``Stopped``
    after ``stop``.
    """
    sizes = [path.stat().st_size for path in paths]
    parts = [
        (at, start) for at, size in enumerate(sizes) for start in range(0, max(size, 1), PART_BYTES)
    ]

    def part_digest(part: tuple[int, int]) -> bytes:
        at, start = part
        return _hash_part(paths[at], start, min(sizes[at], start + PART_BYTES), stop)

    whole = [blake3(size.to_bytes(8, "little")) for size in sizes]
    with ThreadPoolExecutor(
        threads, initializer=partial(give_way, 10) if is_polite else None
    ) as pool:
        for (at, _), digest in zip(parts, pool.map(part_digest, parts), strict=True):
            whole[at].update(digest)
    return [each.digest() for each in whole]


def _hash_part(path: Path, start: int, end: int, stop: Event) -> bytes:
    hasher = blake3()
    buffer = memoryview(bytearray(min(BUFFER_BYTES, end - start)))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while start < end:
            if stop.is_set():
                raise Stopped
            num = os.preadv(fd, [buffer[: end - start]], start)
            if not num:
                raise OSError(f"{path} became shorter while it was read")
            hasher.update(buffer[:num])
            start += num
    finally:
        os.close(fd)
    return hasher.digest()
