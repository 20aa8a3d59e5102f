"""A shared directory, and plain files as large as packs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.stores.servers import DEAD, REQUESTS, Client, Memory, Place, Tier
from kvtier.core.types import BlockKey
from kvtier.tiers.remote.bucket.packs import PACK_BYTES


class PlainFiles(Client):
    """Files with as many blocks as a pack, written and read by one call each, without checks.

    They are read directly into the named memory.
    """

    def __init__(self, folder: Path, at_a_time: int) -> None:
        super().__init__()
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._pool = ThreadPoolExecutor(at_a_time)

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        def write(some: tuple[Path, slice]) -> None:
            part = some[0].with_suffix(".part")
            file = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                assert os.write(file, _bytes(memory, some[1])) == _bytes(memory, some[1]).nbytes
            finally:
                os.close(file)
            part.rename(some[0])

        list(self._pool.map(write, self._files(keys, memory, at)))

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        def read(some: tuple[Path, slice]) -> None:
            file = os.open(some[0], os.O_RDONLY)
            try:
                into = _bytes(memory, some[1])
                assert os.preadv(file, [into], 0) == into.nbytes
            finally:
                os.close(file)

        list(self._pool.map(read, self._files(keys, memory, at)))

    def deliver(self, memory: Memory) -> None:
        """Do nothing: the blocks are in the named memory."""

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            (self._folder / key.hex()).unlink(missing_ok=True)

    def close(self) -> None:
        self._pool.shutdown()

    def _files(
        self, keys: Sequence[BlockKey], memory: Memory, at: slice
    ) -> list[tuple[Path, slice]]:
        num = max(1, PACK_BYTES // memory.block_bytes)
        return [
            (
                self._folder / keys[start].hex(),
                slice(at.start + start, min(at.start + start + num, at.stop)),
            )
            for start in range(0, len(keys), num)
        ]


def _bytes(memory: Memory, at: slice) -> memoryview:
    return np.ascontiguousarray(memory.blocks[at]).reshape(-1).data


class DirectoryPlace(Place):
    """A folder on the file system of temporary files."""

    name, client_name = "dir", "plain files"
    packages = ()
    port = 0
    has_to_ask = False
    troubles = (DEAD,) if shutil.which("bindfs") else ()

    @classmethod
    def missing(cls) -> str | None:
        return None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def location(self, port: int, threads: int) -> str:
        options = f"requests={REQUESTS}&readers={threads}&writers={threads}"
        return f"dir://{self._folder}/tier?{options}"

    def client(self, threads: int) -> Client:
        return PlainFiles(self._folder / "client", threads * REQUESTS)

    def close(self) -> None:
        """Nothing runs."""

    def far(self, round_trip_s: float, block_bytes: int, num_blocks: int) -> Tier:
        """Look-ups send no request, so there is nothing to delay."""
        del round_trip_s
        return self.tier(block_bytes, num_blocks, 1)

    @contextmanager
    def way(self) -> Iterator[tuple[int, Callable[[str], AbstractContextManager[None]]]]:
        """Mount the folder through a process, as that of a file server that may stop."""
        behind, front = self._folder / "behind", self._folder / "tier"
        for folder in (behind, front):
            folder.mkdir()
        server = subprocess.Popen(["bindfs", "-f", behind, front])
        while not front.is_mount():
            assert server.poll() is None, "bindfs could not mount a folder"
            time.sleep(0.01)

        @contextmanager
        def stopped(trouble: str) -> Iterator[None]:
            assert trouble == DEAD
            server.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                server.send_signal(signal.SIGCONT)

        try:
            yield 0, stopped
        finally:
            server.terminate()
            server.wait()
