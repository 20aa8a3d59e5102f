"""Lines of a trace, packed or not, each with its place for whoever has to complain."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, printable

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

MAX_TIME = 1e15
"""Seconds, or milliseconds: what is above is a mistake."""

Tell = Callable[[int], None]
"""How many bytes of the file are read."""


def check_counts(*values: float) -> None:
    """Raise ``ValueError`` where one of them is below 0, or above what can be meant."""
    for value in values:
        if not 0 <= value < MAX_TIME:
            raise ValueError(f"{value} is out of range")


class Line:
    """A line of a file. number: from 1."""

    __slots__ = ("number", "path", "text")

    def __init__(self, path: Path, number: int, text: str) -> None:
        self.path, self.number, self.text = path, number, text

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(printable(f"{self.path}:{self.number}: {why}"))

    def json(self) -> Any:
        """The line's value; ``ConfigError`` where it is no JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            self.refuse("no JSON; every line of this trace is a JSON value")

    def number_of(self, fields: dict[str, Any], name: str) -> float:
        """A field that must be a finite number."""
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(f"{name} is {_shown(value)}, and should be a number")
        if not abs(value) < MAX_TIME:
            self.refuse(f"{name} is {_shown(value)}: out of range")
        return float(value)

    def count_of(self, fields: dict[str, Any], name: str) -> int:
        """A field that must be 0 or more."""
        value = self.number_of(fields, name)
        if value < 0:
            self.refuse(f"{name} is {_shown(fields[name])}, and should be 0 or more")
        return int(value)

    def ids(self, values: object, name: str) -> npt.NDArray[np.uint64]:
        """A list of integers in 0 .. 2**64 - 1."""
        if not isinstance(values, list) or not all(type(each) is int for each in values):
            self.refuse(f"{name} should be a list of integers")
        try:
            return np.array(values, np.uint64)
        except OverflowError:
            self.refuse(f"{name} should be integers in 0 .. 2**64 - 1")


def lines_of(path: Path, tell: Tell | None = None) -> Iterator[Line]:
    """The lines that are not empty. Reads .gz and .zst by what is in them, not by their names."""
    with _raw(path) as raw, _unpacked(path, raw) as text:
        try:
            for number, line in enumerate(text, 1):
                if tell is not None and not number % 64:
                    tell(raw.tell())
                if line.strip():
                    yield Line(path, number, line)
        except (OSError, EOFError) as error:
            raise ConfigError(f"{path}: can't be unpacked: {error}") from error


def _raw(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error


@contextmanager
def _unpacked(path: Path, raw: IO[bytes]) -> Iterator[IO[str]]:
    try:
        begin = raw.read(4)
        raw.seek(0)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    if begin[:2] == GZIP:
        yield io.TextIOWrapper(gzip.GzipFile(fileobj=raw), encoding="utf-8", errors="replace")
    elif begin == ZSTD:
        with _zstd(path, raw) as unpacked:
            yield io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace")
    else:
        yield io.TextIOWrapper(raw, encoding="utf-8", errors="replace")


@contextmanager
def _zstd(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """By Python's own module, the package that brings it to older versions, or the program."""
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
        raise ConfigError(f"{path} is packed by zstd: pip install 'kvtier[replay]', or unpack it")
    os.lseek(raw.fileno(), 0, os.SEEK_SET)  # it gets the file, not what is buffered here
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


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:40]
