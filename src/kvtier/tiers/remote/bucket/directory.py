"""Objects as files in a directory that machines share.

A file is written under a temporary name beside its place, and renamed, so that a reader finds all
of it or nothing. Files of the same name are equal or created only once, so no writer needs a lock.
Nothing is flushed to the disk: what a power cut tears is found by the checksums of its reader.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

from kvtier.tiers.remote.bucket.manifests import MAX_BYTES
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound, Unwritable
from kvtier.tiers.remote.location import Location

Result = TypeVar("Result")

NUM_THREADS: Final = 16
FILE_MODE: Final = 0o660
FOLDER_MODE: Final = 0o770
"""Without the bits of the umask. Others never read the KV; a group may share it."""
LEFTOVER_S: Final = 3600.0
"""Age from which a temporary file belongs to a writer that has died. Writes take a minute."""
NUM_TRIES: Final = 3
CLOCK_S: Final = 30.0
"""Difference between the clocks of machines that is not taken for a use."""
NO_WRITES: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM}
)
NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class FileThreads:
    """Daemon threads for calls of a file system, which can't be cancelled.

    A process may end while one of them waits for a server that does not answer.
    """

    def __init__(self, num_threads: int) -> None:
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._num_threads = num_threads
        self._num_started = 0
        self._num_waiting = 0

    async def run(self, call: Callable[[], Result]) -> Result:
        """Return the result of ``call``, or raise its exception. For one event loop."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._num_waiting += 1
        if self._num_started < min(self._num_waiting, self._num_threads):
            self._num_started += 1
            Thread(target=self._work, name="kvtier files", daemon=True).start()
        self._calls.put((answer, call))
        try:
            return await answer
        finally:
            self._num_waiting -= 1

    def _work(self) -> None:
        while True:
            answer, call = self._calls.get()
            if answer.cancelled():
                continue
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop was closed
                answer.get_loop().call_soon_threadsafe(_end, answer, result, error)
            del answer, call, result, error


def _end(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


class Directory(ObjectStore):
    """Objects below a directory."""

    def __init__(self, location: Location) -> None:
        self._root = Path("/") / location.path
        self._threads = FileThreads(NUM_THREADS)

    async def put(self, path: str, content: object, create: bool = False) -> None:
        await self._threads.run(lambda: self._translated(lambda: self._put(path, content, create)))

    async def get(self, path: str) -> bytes:
        def get() -> bytes:
            size = min(MAX_BYTES, (self._root / path).stat().st_size)
            return bytes(self._part(path, 0, np.empty(size, np.uint8).data))

        return await self._threads.run(lambda: self._translated(get))

    async def part(self, path: str, start: int, end: int) -> memoryview:
        # Made by this thread: malloc keeps memory for each thread, and there are many below.
        into = np.empty(max(0, end - start), np.uint8).data
        return await self._threads.run(
            lambda: self._translated(lambda: self._part(path, start, into))
        )

    async def listed(self, path: str) -> list[Listed]:
        return await self._threads.run(lambda: self._translated(lambda: self._listed(path)))

    async def delete(self, paths: Sequence[str]) -> None:
        await self._threads.run(lambda: self._translated(lambda: self._delete(paths)))

    async def delete_unused(self, used: Mapping[str, float]) -> dict[str, float | None]:
        """Delete files that were not used after the times in ``used``.

        Returns for each path the time of its last use, if that was later; None if it is gone.
        """
        return await self._threads.run(lambda: self._translated(lambda: self._delete_unused(used)))

    async def self_test(self) -> float:
        await self._threads.run(self._prepare)
        began = time.monotonic()
        try:
            return await super().self_test()
        except Unwritable:
            await self.listed("manifests")
            return time.monotonic() - began

    def explain(self, error: Refused | Unsound) -> str:
        return str(error)

    # -- in the threads ----------------------------------------------------------------------------

    def _translated(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call, whose errors become those of ``ObjectStore``."""
        try:
            return call()
        except FileExistsError:
            raise Taken from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else "no answer"
            if error.errno in NO_WRITES:
                raise Unwritable(reason) from None
            if error.errno in GONE and self._is_there():
                raise Missing(reason) from None
            raise Unreachable(reason) from None

    def _is_there(self) -> bool:
        try:
            return stat.S_ISDIR(self._root.stat().st_mode)
        except OSError:
            return False

    def _prepare(self) -> None:
        """Make the directory if only it is missing. Raises ``Refused`` if it can't be used."""
        try:
            with suppress(FileExistsError):
                self._root.mkdir(FOLDER_MODE)
            os.listdir(self._root)
            probe = self._root / _temporary("probe")
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
            probe.unlink()
        except OSError as error:
            if error.errno == errno.ENOENT:
                reason = f"there is no folder {self._root.parent}; make it, or mount what has it"
            elif error.errno == errno.ENOTDIR:
                reason = f"{self._root} is no folder; name another one"
            elif error.errno in (errno.EACCES, errno.EPERM):
                reason = (
                    f"user {os.geteuid()} may not write in {self._root}; change its owner or mode "
                    "(on NFS with root_squash, root is another user)"
                )
            elif error.errno in NO_WRITES and self._is_there():
                return
            else:
                raise Unreachable(os.strerror(error.errno or 0)) from None
            raise Refused(reason) from None

    def _put(self, path: str, content: object, create: bool) -> None:
        place = self._root / path
        temporary = place.with_name(_temporary(place.name))
        file = self._open_new(temporary)
        try:
            try:
                _write(file, memoryview(content).cast("B"))  # type: ignore[arg-type]
            finally:
                os.close(file)  # on NFS it raises what the server could not write
            if create:
                _link(temporary, place)
            else:
                temporary.rename(place)
                return
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        with suppress(OSError):
            temporary.unlink()

    def _open_new(self, path: Path) -> int:
        """Open a new file. Its folder is made if it is missing, but never the directory itself."""
        for left in reversed(range(NUM_TRIES)):
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            except FileNotFoundError:
                if not left or not self._is_there():
                    raise
            for parent in reversed(path.relative_to(self._root).parents[:-1]):
                with suppress(FileExistsError, FileNotFoundError):
                    (self._root / parent).mkdir(FOLDER_MODE)
        raise AssertionError

    def _part(self, path: str, start: int, into: memoryview) -> memoryview:
        for left in reversed(range(NUM_TRIES)):
            try:
                return _read(self._root / path, start, into, self.touch_s)
            except OSError as error:
                if error.errno != errno.ESTALE or not left:  # another client has replaced the file
                    raise
        raise AssertionError

    def _listed(self, path: str) -> list[Listed]:
        found: list[Listed] = []
        oldest_s = time.time() - LEFTOVER_S
        folders = [self._root / path]
        while folders:
            try:
                entries = list(os.scandir(folders.pop()))
            except OSError as error:
                if error.errno in GONE and self._is_there():
                    continue
                raise
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:  # deleted meanwhile
                    continue
                if entry.name.startswith("."):
                    if facts.st_mtime < oldest_s:
                        with suppress(OSError):
                            os.unlink(entry.path)
                elif stat.S_ISREG(facts.st_mode):
                    name = str(Path(entry.path).relative_to(self._root))
                    found.append(Listed(name, facts.st_size, facts.st_mtime))
        return found

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                (self._root / path).unlink()
        for folder in {(self._root / path).parent for path in paths} - {self._root}:
            with suppress(OSError):  # it is in use
                folder.rmdir()

    def _delete_unused(self, used: Mapping[str, float]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for path, used_s in used.items():
            try:
                now_s = (self._root / path).stat().st_mtime
                if now_s > used_s + CLOCK_S:
                    found[path] = now_s
                    continue
                (self._root / path).unlink()
            except OSError as error:
                if error.errno not in GONE:
                    raise
            found[path] = None
        return found


def _temporary(name: str) -> str:
    """Return a name that no other process uses, and that no list has."""
    return f".{name}.{os.urandom(8).hex()}"


def _write(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]


def _link(temporary: Path, place: Path) -> None:
    """Give a file its name, unless another one has it.

    Raises ``FileExistsError``, and ``Unsound`` for a file system that can't do this.
    """
    try:
        place.hardlink_to(temporary)
    except FileExistsError:
        # A repeated request to an NFS server finds the file that the first one has made.
        if temporary.stat().st_nlink < 2:
            raise
    except OSError as error:
        if error.errno in NO_LINKS:
            raise Unsound(
                f"{place.parent} is on a file system without hard links, which make a file only "
                "if there is none of that name; use another one"
            ) from None
        raise


def _read(path: Path, start: int, into: memoryview, touch_s: float) -> memoryview:
    """Read a part of a file. Return the beginning of ``into``, up to the end of the file."""
    file = os.open(path, os.O_RDONLY)
    try:
        if touch_s and time.time() - os.fstat(file).st_mtime > touch_s:
            with suppress(OSError):  # read-only, or another user's
                os.utime(file)  # not the time of access: most mounts do not keep it
        done = 0
        while done < len(into):
            num_bytes = os.preadv(file, [into[done:]], start + done)
            if not num_bytes:
                break
            done += num_bytes
        return into[:done]
    finally:
        os.close(file)
