"""Digests of files read before, by their stamps, in the user's cache folder.

    weights/<hash of the model's path>.json
    {"version": 1, "model": path,
     "files": {path: [size, mtime_ns, ctime_ns, inode, digest]}, "check": hash of the rest}

There is one file per model, replaced atomically: processes never wait for each other, and the last
writer wins. A file that is damaged or that others could have written is ignored.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from secrets import token_hex

from blake3 import blake3

from kvtier.core.system.user_paths import cache_folder
from kvtier.identity.files import Stamp

logger = logging.getLogger(__name__)

VERSION = 1
MAX_BYTES = 4 << 20
"""Largest size of one model's file: entries for about ten thousand weight files."""
MAX_MODELS = 64
"""Maximum number of files; the oldest is removed first."""
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

Records = Mapping[str, tuple[Stamp, str]]
"""By path: the stamp of a file, and the digest of its content in hex."""


class WeightsMemory:
    """Remembers digests of weights by the stamps of their files.

    folder: created when something is remembered. Default: in the user's cache folder. A folder that
    others own or may write to is not used.

    Never raises: what cannot be remembered is read again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "weights"

    def recall(self, model: str) -> Records:
        """Return what was remembered of a model; nothing if there is any doubt."""
        try:
            with self._open_folder() as folder:
                content = _read(folder, _name(model))
            return {} if content is None else _parse(content, model)
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            logger.info("remembered weights not used folder=%s reason=%s", self._folder, error)
            return {}

    def remember(self, model: str, records: Records) -> bool:
        """Replace what was remembered of this model. Return False if that cannot be written."""
        content = _format(model, records)
        if len(content) > MAX_BYTES:
            return False
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._open_folder() as folder:
                _replace(folder, _name(model), content)
                _prune(folder)
        except OSError as error:
            logger.info("weights not remembered folder=%s reason=%s", self._folder, error)
            return False
        return True

    def forget(self, model: str) -> None:
        """Remove what was remembered of this model."""
        with suppress(OSError), self._open_folder() as folder:
            os.unlink(_name(model), dir_fd=folder)

    @contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Yield the checked folder, through whose descriptor all files are reached."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _refuse_foreign(os.fstat(fd), "the folder")
            yield fd
        finally:
            os.close(fd)


def _refuse_foreign(found: os.stat_result, what: str) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS_MAY_WRITE:
        raise PermissionError(f"{what} belongs to somebody else, or others may write to it")


def _name(model: str) -> str:
    return f"{blake3(os.fsencode(model)).hexdigest(length=16)}.json"


def _read(folder: int, name: str) -> bytes | None:
    # Non-blocking: opening a pipe of that name would wait otherwise.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        _refuse_foreign(found, "the file")
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            return None
        return file.read(MAX_BYTES)


def _replace(folder: int, name: str, content: bytes) -> None:
    new = f"{name}.{token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def _prune(folder: int) -> None:
    """Keep only the newest files; temporary files of killed processes are removed, too."""
    written: list[tuple[int, str]] = []
    for name in os.listdir(folder):
        with suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            written.append((found.st_mtime_ns, name))
    for _, name in sorted(written)[:-MAX_MODELS]:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _format(model: str, records: Records) -> bytes:
    files = {path: [*astuple(stamp), digest] for path, (stamp, digest) in records.items()}
    content = {"version": VERSION, "model": model, "files": files}
    return json.dumps({**content, "check": _check(content)}).encode()


def _parse(content: bytes, model: str) -> Records:
    found = json.loads(content)
    check = found.pop("check")
    if check != _check(found) or found["version"] != VERSION or found["model"] != model:
        raise ValueError("it is damaged, or of another version")
    return {path: (Stamp(*stamp), digest) for path, (*stamp, digest) in found["files"].items()}


def _check(content: Mapping[str, object]) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
