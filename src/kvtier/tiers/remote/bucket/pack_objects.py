"""Objects of a pack file, which are only read."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.tiers.remote.bucket.directory import FileThreads
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore
from kvtier.tiers.remote.bucket.opening import PackFileOptions
from kvtier.tiers.remote.bucket.pack_file import PackFile
from kvtier.tiers.remote.bucket.signing import read_public_key
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound, Unwritable
from kvtier.tiers.remote.location import Location

NUM_THREADS: Final = 8
READ_ONLY: Final = "a pack file is only read"


def open_pack_file(location: Location, options: PackFileOptions) -> PackFile:
    """Return the file at a URL, with its signature checked if the URL names a key.

    Raises ``ConfigError`` for a file that can't be used.
    """
    key = read_public_key(options.public_key) if options.public_key else b""
    return PackFile(Path("/") / location.path, key)


class PackFileObjects(ObjectStore):
    """Objects of a pack file. All of it is verified first. Raises ``ConfigError`` if it is wrong.

    file: the open file. Another file that gets its name meanwhile is not noticed.
    """

    def __init__(self, file: PackFile) -> None:
        file.verify()
        self._file = file
        self._sizes = file.sizes()
        self._threads = FileThreads(NUM_THREADS)

    async def put(self, path: str, content: object, create: bool = False) -> None:
        raise Unwritable(READ_ONLY)

    async def get(self, path: str) -> bytes:
        return bytes(await self.part(path, 0, self._sizes.get(path, 0)))

    async def part(self, path: str, start: int, end: int) -> memoryview:
        def read() -> memoryview:
            try:
                found = self._file.part(path, start, end)
            except OSError as error:
                raise Unreachable(os.strerror(error.errno or 0)) from None
            if found is None:
                raise Missing(path)
            return found

        return await self._threads.run(read)

    async def listed(self, path: str) -> list[Listed]:
        written_s = self._file.written_s
        return [
            Listed(name, size, written_s)
            for name, size in self._sizes.items()
            if name.startswith(f"{path}/")
        ]

    async def delete(self, paths: Sequence[str]) -> None:
        if paths:
            raise Unwritable(READ_ONLY)

    def explain(self, error: Refused | Unsound) -> str:
        return str(error)

    async def self_test(self) -> float:
        began = time.monotonic()
        for path in list(self._sizes)[:1]:
            await self.part(path, 0, 1)
        return time.monotonic() - began
