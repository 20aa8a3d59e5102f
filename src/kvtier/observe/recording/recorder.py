"""Writes requests to a file on its own thread, so that no request waits."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import ConfigError
from kvtier.core.system.private_files import open_file
from kvtier.observe.recording.chains import Chains
from kvtier.observe.recording.format import MARK, Header, LineWriter

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096
MAX_QUEUED_TOKENS = 8 << 20
"""Largest number of tokens of requests queued for writing, which bounds their memory."""
HASH_TOKENS = 8
"""Memory of a prefix hash, in tokens."""
FLUSH_S = 1.0
LEAST_BYTES = 1 << 20
TAIL_BYTES = 16 << 20
"""Bytes at the end of the file that are searched for the last complete line."""


Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request to be written.

    keys: creates the keys, on the writer's thread.
    held: memory that it holds until then, in tokens.
    began: ``time.monotonic`` at its arrival.
    """

    began: float
    input_tokens: int
    output_tokens: int
    keys: Callable[[], Keys]
    held: int


class Recorder:
    """Records requests to ``path``. Call ``close`` at the end.

    The file's directory must exist. An existing recording is continued, unless it is a link or
    another user's. When the file reaches half of ``max_bytes`` it is renamed to ``path`` + ".1",
    replacing an older one, and a new file is begun. So the latest requests are kept in at most
    ``max_bytes``.

    chains: creates the keys.
    count: called for each request with whether it was written, on any thread.

    Raises ``ConfigError`` if the file cannot be written, is not a recording, belongs to another
    user or is in use by another recorder.
    """

    def __init__(
        self,
        path: Path,
        chains: Chains,
        max_bytes: int = 1 << 30,
        count: Callable[[bool], None] = lambda written: None,
    ) -> None:
        _check_limit(max_bytes)
        self._path = path
        self._chains = chains
        self._max_bytes = max_bytes // 2
        self._count = count
        self._queue: deque[_Asked] = deque()
        self._num_queued_tokens = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_failed = False
        try:
            self._file = _opened(path)
            self._begin()
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"record: can't write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        self._thread.start()

    def offer(
        self, began: float, tokens: Sequence[int], output_tokens: int, tenant: str = ""
    ) -> None:
        """Queue an answered request. Thread-safe; never waits for the disk.

        If the queue is full, the request is dropped and counted.

        began: ``time.monotonic`` at its arrival.
        tokens: of its prompt; must not change any more.
        """
        make_keys = partial(self._chains.keys, tokens, tenant)
        self._queue_up(_Asked(began, len(tokens), output_tokens, make_keys, len(tokens)))

    def offer_hashes(
        self, began: float, hashes: Sequence[bytes], input_tokens: int, output_tokens: int
    ) -> None:
        """Queue a request of an engine that has its own hashes of prefixes.

        hashes: of the prompt's full blocks; see ``Chains.keys_of_hashes``.
        """
        make_keys = partial(self._chains.keys_of_hashes, hashes)
        held = HASH_TOKENS * len(hashes)
        self._queue_up(_Asked(began, input_tokens, output_tokens, make_keys, held))

    def _queue_up(self, asked: _Asked) -> None:
        with self._changed:
            num_tokens = self._num_queued_tokens + asked.held
            fits = len(self._queue) < MAX_QUEUED and num_tokens <= MAX_QUEUED_TOKENS
            if fits and not self._is_closed and not self._has_failed:
                self._queue.append(asked)
                self._num_queued_tokens = num_tokens
                self._changed.notify()
                return
        self._count(False)

    def close(self) -> None:
        """Write the queued requests and close the file. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        flushed = time.monotonic()
        while True:
            with self._changed:
                if not self._queue and not self._is_closed:
                    self._changed.wait(FLUSH_S)
                asked = self._queue.popleft() if self._queue else None
                if asked is not None:
                    self._num_queued_tokens -= asked.held
                elif self._is_closed:
                    break
            self._write(asked)
            if asked is None or time.monotonic() - flushed > FLUSH_S:
                self._guarded(self._file.flush)
                flushed = time.monotonic()
        self._guarded(self._file.close)

    def _write(self, asked: _Asked | None) -> None:
        if asked is None:
            return
        try:
            keys = asked.keys()
        except ValueError:  # invalid token ids: drop this request only
            self._count(False)
            return
        if not self._has_failed:
            self._guarded(lambda: self._append(asked, keys))
        self._count(not self._has_failed)

    def _append(self, asked: _Asked, keys: Keys) -> None:
        if self._num_bytes >= self._max_bytes:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = _opened(self._path)
            self._begin()
        line = self._lines.line(
            asked.began - self._started, asked.input_tokens, asked.output_tokens, keys
        ).encode()
        self._file.write(line)
        self._num_bytes += len(line)

    def _begin(self) -> None:
        """Write a header; row numbers start after it.

        Only the header has the time of day, which may be changed while requests arrive.
        """
        self._started = time.monotonic()
        self._lines = LineWriter()
        header = Header(self._chains.block_tokens, self._chains.name, time.time())
        self._file.write(header.line().encode())
        self._num_bytes = self._file.tell()

    def _guarded(self, write: Callable[[], object]) -> None:
        """Run ``write``. On a write error, stop recording and log it; nothing is raised."""
        try:
            write()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                logger.warning("recording stopped path=%s error=%s", self._path, error)
            self._has_failed = True


def check_recording(path: Path, max_bytes: int) -> None:
    """Raise ``ConfigError`` if no recorder could write to ``path`` now. A missing file is made."""
    _check_limit(max_bytes)
    try:
        _opened(path).close()
    except OSError as error:
        raise ConfigError(f"record: can't write {path}: {error.strerror}") from error


def _check_limit(max_bytes: int) -> None:
    if max_bytes < LEAST_BYTES:
        raise ConfigError(f"record_max_bytes: {max_bytes} is below 1 MiB")


def _opened(path: Path) -> BinaryIO:
    """Open the file after its last complete line; a partial line of a crash is removed."""
    if not path.parent.is_dir():
        raise ConfigError(f"record: there is no directory {path.parent}; make it first")
    try:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"record: {path} is a link; name the file that it leads to") from None
        raise
    file = os.fdopen(fd, "r+b")
    try:
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"record: {path} belongs to user {owner}, and this process runs as user "
                f"{os.geteuid()}; name another file"
            )
        _lock(path, file)
        end = file.seek(0, os.SEEK_END)
        if end:
            _check_is_recording(path, file)
            begin = file.seek(max(0, end - TAIL_BYTES))
            file.seek(begin + file.read().rfind(b"\n") + 1)
            file.truncate()
    except BaseException:
        file.close()
        raise
    return file


def _lock(path: Path, file: BinaryIO) -> None:
    """Lock the file until it is closed: two writers would refer to each other's rows."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"record: {path} is being written to; name another file") from None
    except OSError as error:  # a file system without locks
        logger.info("recording without a lock path=%s error=%s", path, error)


def _check_is_recording(path: Path, file: BinaryIO) -> None:
    file.seek(0)
    try:
        header = json.loads(file.readline(1024))
    except ValueError:
        header = None
    if not isinstance(header, dict) or MARK not in header:
        raise ConfigError(f"record: {path} is there and is no recording; name another file")
