"""Lines of a trace, compressed or not, each with its location for error messages."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import itertools
import json
import os
import shutil
import stat
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.errors import ConfigError, install_command, printable
from kvtier.tools.replay.trace import BYTES_PER_BLOCK

if TYPE_CHECKING:
    from kvtier.tools.replay.trace import TraceBuilder

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

MAX_TIME = 1e15
"""Largest time, in seconds or milliseconds; larger ones are mistakes."""

MAX_REASON = 300
"""Most characters of a reason, which may quote a value from the file."""
MAX_ID_BITS = 512
MAX_BLOCK_TOKENS = 1 << 20
MAX_LINE = 1 << 25
"""Most characters of a line. A prompt of a million tokens takes about 12 million, with its text and
its ids."""
MAX_EMPTY = 1_000_000
"""Most consecutive empty lines."""
MAX_RATIO = 100
"""Largest growth of a compressed file. Traces become 5 to 50 times as large."""
LEAST_LIMIT = 1 << 23
"""Characters to which the beginning of any file may be decompressed."""

Tell = Callable[[int], None]
"""Progress callback: bytes of the file read."""


def check_counts(*values: float) -> None:
    """Raise ``ValueError`` if a value is below 0 or implausibly large."""
    for value in values:
        if not 0 <= value < MAX_TIME:
            raise ValueError(f"{shown(value)} is out of range")


class TraceLine:
    """A line of a file.

    number: line number, from 1.
    stamp: time of a log's line, if something else than its program noted it.
    source: writer of a log's line, whose long lines are cut into pieces without a mark; None if
        this line is known to be whole.
    """

    __slots__ = ("number", "path", "source", "stamp", "text")

    def __init__(
        self, path: Path, number: int, text: str, stamp: str = "", source: str | None = ""
    ) -> None:
        self.path, self.number, self.text = path, number, text
        self.stamp, self.source = stamp, source

    def part(self, text: str, stamp: str, source: str | None) -> TraceLine:
        """Return the text in a log's record as a line of its own."""
        return TraceLine(self.path, self.number, text, stamp, source)

    def refuse(self, why: str) -> NoReturn:
        raise self.refusal(why)

    def refusal(self, why: str) -> ConfigError:
        """Return the error that names this line."""
        return ConfigError(printable(f"{self.path}:{self.number}: {why[:MAX_REASON]}"))

    def cut_short(self) -> str:
        """Return a note that this last line was left out."""
        return f"The last line of {self.path.name} is cut short, and was left out."

    def check_room(self, num_blocks: int, builder: TraceBuilder) -> None:
        """Raise ``ConfigError`` for a request that exceeds the limit of the trace."""
        if not builder.has_room(num_blocks):
            gib = builder.max_blocks * BYTES_PER_BLOCK / (1 << 30)
            self.refuse(
                f"up to here the trace has more than {builder.max_blocks:,} blocks, which take "
                f"{gib:.1f} GiB to replay, and there is no more: replay a part of the trace"
            )

    def json(self) -> Any:
        """Return the line's JSON value; raise ``ConfigError`` if it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            self.refuse("no JSON; every line of this trace is a JSON value")

    def number_of(self, fields: dict[str, Any], name: str) -> float:
        """Return a field that must be a finite number."""
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(f"{name} is {shown(value)}, and should be a number")
        if not abs(value) < MAX_TIME:
            self.refuse(f"{name} is {shown(value)}: out of range")
        return float(value)

    def time_of(self, text: str, name: str) -> float:
        """Return a time in ISO 8601, in seconds since 1970. Without a zone it is in UTC."""
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            self.refuse(
                f"{name} is {shown(text)}, and should be a time in seconds, or like "
                "2026-01-31T12:00:00Z"
            )
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()

    def count_of(self, fields: dict[str, Any], name: str) -> int:
        """Return a field that must be 0 or more, as an integer."""
        value = self.number_of(fields, name)
        if value < 0:
            self.refuse(f"{name} is {shown(fields[name])}, and should be 0 or more")
        return int(value)

    def block_tokens_of(self, fields: dict[str, Any], name: str) -> int:
        """Return a field that must be a number of tokens per block."""
        value = fields.get(name)
        if type(value) is not int or not 0 < value <= MAX_BLOCK_TOKENS:
            self.refuse(f"{name} is {shown(value)}, and should be tokens per block")
        return value

    def ids(self, values: object, name: str) -> npt.NDArray[np.uint64]:
        """Return a list of integers. Those outside 0 .. 2**64 - 1 are folded into that range."""
        if values is None:
            self.refuse(f"{name} is missing")
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            self.refuse(f"{name} should be a list of integers")
        try:
            return np.array(values, np.uint64)
        except OverflowError:
            if max(map(abs, values)) >> MAX_ID_BITS:
                self.refuse(f"{name} should be integers of {MAX_ID_BITS} bits at most")
            return np.array([_folded(value) for value in values], np.uint64)


def lines_of(path: Path, tell: Tell | None = None) -> Iterator[TraceLine]:
    """Yield the lines that are not empty.

    Compressed files are detected by content, not by name. What was read may have grown by
    ``MAX_RATIO``: a bomb is refused soon, not when it is as large as its whole file allows.
    """
    with _raw(path) as raw, _unpacked(path, raw) as unpacked:
        size = os.fstat(raw.fileno()).st_size
        text = io.TextIOWrapper(unpacked, _encoding(path, unpacked), errors="replace")
        num_read = num_empty = 0
        for number in itertools.count(1):
            try:
                line = text.readline(MAX_LINE + 1)
                num_read += len(line)
                # A log that is truncated while it is written begins with a hole.
                while line.startswith("\0") and not _is_bomb(raw, num_read):
                    line = line.lstrip("\0")
                    if not line:
                        line = text.readline(MAX_LINE + 1)
                        num_read += len(line)
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigError(f"{path}: can't be unpacked: {error}") from error
            if not line:
                return
            if len(line) > MAX_LINE or _is_bomb(raw, num_read):
                _refuse_size(path, number, size, len(line))
            if tell is not None and not number % 64:
                tell(raw.tell())
            num_empty += 1
            if line.strip():
                num_empty = 0
                yield TraceLine(path, number, line)
            elif num_empty > MAX_EMPTY:
                raise ConfigError(f"{path}:{number}: {MAX_EMPTY:,} empty lines, as no trace has")


def _is_bomb(raw: IO[bytes], num_read: int) -> bool:
    return num_read > LEAST_LIMIT and num_read > MAX_RATIO * raw.tell()


def _refuse_size(path: Path, number: int, size: int, length: int) -> NoReturn:
    if length > MAX_LINE:
        why = f"a line of more than {MAX_LINE:,} characters; no request of a trace is as long"
    else:
        why = (
            f"{size:,} bytes that unpack to more than {MAX_RATIO} times as many, as no trace does; "
            "if it is one, unpack it first"
        )
    raise ConfigError(f"{path}:{number}: {why}")


def _encoding(path: Path, unpacked: IO[bytes]) -> str:
    """Return the encoding of a byte order mark, otherwise UTF-8."""
    try:
        begin = unpacked.peek(4)[:4]  # type: ignore[attr-defined]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: can't be unpacked: {error}") from error
    return "utf-16" if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def check_file(path: Path) -> None:
    """Raise ``ConfigError`` for a file that can't be opened."""
    _raw(path).close()


def _raw(path: Path) -> IO[bytes]:
    """Open a file. Raise ``ConfigError`` for a pipe or a device, without waiting for it."""
    try:
        raw = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise ConfigError(f"{path}: can't be read: it is no file; save it as one first")
    return raw


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _unpacked(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the decompressed bytes of the file, as a stream with ``peek``."""
    try:
        begin = raw.read(4)
        raw.seek(0)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    if begin[:2] == GZIP:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    elif begin == ZSTD:
        with _zstd(path, raw) as unpacked:
            yield unpacked
    else:
        yield raw


@contextmanager
def _zstd(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Decompress by Python's own module, its backport, or the ``zstd`` program."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        try:
            yield module.ZstdFile(raw)
        except module.ZstdError as error:
            raise ConfigError(f"{path}: can't be unpacked: {error}") from error
        return
    program = shutil.which("zstd")
    if program is None:
        raise ConfigError(
            f"{path} is packed by zstd; unpack it, or install a reader: {install_command('replay')}"
        )
    os.lseek(raw.fileno(), 0, os.SEEK_SET)  # the program reads the file, not this buffer
    with subprocess.Popen([program, "-dcq"], stdin=raw, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            yield running.stdout
        except GeneratorExit:
            running.kill()
            raise
        running.stdout.close()
        if running.wait():
            raise ConfigError(f"{path}: can't be unpacked: zstd says that it is damaged")


def _folded(value: int) -> int:
    """Return 64 bits of a negative or wide id. Different ids collide only by chance."""
    if -(1 << 63) <= value < 1 << 64:
        return value & (1 << 64) - 1
    wide = value.to_bytes(MAX_ID_BITS // 8 + 8, "little", signed=True)
    return int.from_bytes(blake3(wide).digest(8), "little")


def shown(value: object) -> str:
    """Format any value from a file for a message."""
    if value is None:
        return "missing"
    if isinstance(value, (list, dict)):
        return f"a JSON {'list' if isinstance(value, list) else 'object'}"
    return repr(value)[:40]
