"""The files of a model that determine its KV, and their stamps."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

COUNTED = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".tensors", ".json", ".py"}
)
"""Suffixes of weights, of their configuration, and of code."""
SAY_NOTHING = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Files about text and sampling only. They are not part of the identity: keys hold token ids."""
GRAIN_NS = 2 * 10**9
"""Upper bound of the time resolution of file systems: within it a file may change again without a
new time."""
TELLING_SINCE_NS = 946_684_800 * 10**9
"""The year 2000: reproducible images set all times to an earlier one."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size, times (ns since 1970) and inode of a file. No user can set ``ctime_ns``."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


def is_counted(path: Path) -> bool:
    """Whether a file of this name determines KV."""
    return path.suffix in COUNTED and path.name not in SAY_NOTHING


Files = Mapping[Path, Stamp | None]
"""Stamps by path, in order; None for a dangling link."""


def model_files(model: Path) -> Files:
    """Return the relevant files of a folder, without its subfolders, or the file ``model``.

    Raises ``OSError`` if that cannot be read.
    """
    if not model.is_dir():
        return {model: Stamp.of(model.stat())}
    found: dict[Path, Stamp | None] = {}
    for path in sorted(model.iterdir()):
        if not is_counted(path):
            continue
        try:
            seen = path.stat()
        except FileNotFoundError:
            found[path] = None
            continue
        if stat.S_ISREG(seen.st_mode):
            found[path] = Stamp.of(seen)
    return found


def telling(stamps: Mapping[str, Stamp], now_ns: int) -> set[str]:
    """Return the files whose stamps would reveal a change after ``now_ns``.

    ``now_ns`` is when reading them began. Excluded are files that changed just before or later, and
    files with artificial times: before 2000, or identical to the second for all of them.
    """
    times = {stamp.mtime_ns for stamp in stamps.values()}
    if len(stamps) > 1 and len(times) == 1 and not next(iter(times)) % 10**9:
        return set()
    return {
        name
        for name, stamp in stamps.items()
        if stamp.mtime_ns >= TELLING_SINCE_NS and stamp.changed_ns <= now_ns - GRAIN_NS
    }


def process_start_ns() -> int | None:
    """Return the start of this process in ns since 1970, to about 10 ms; None if unknown."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time_ns() - int(age_s * 1e9)
