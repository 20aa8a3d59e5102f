"""The files of a model that decide on its KV, and how they looked."""

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
"""Weights, what says how they are computed with, and code."""
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
"""File systems count time in steps of up to this: a file may change once more within one, and look
the same."""
TELLING_SINCE_NS = 946_684_800 * 10**9
"""The year 2000: images that are built to be reproducible set all times to an earlier one."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Stamp of a file: sizes and times in ns since 1970. No user can set ``ctime_ns``."""

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
    """Whether a file of this name decides on KV."""
    return path.suffix in COUNTED and path.name not in SAY_NOTHING


Files = Mapping[Path, Stamp | None]
"""By path, in order; None for a link to what is not there."""


def model_files(model: Path) -> Files:
    """The files that count, of a folder, without those of its folders.

    Or the one that ``model`` is. OSError where that can't be read.
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
    """Return the files whose stamps would show a change after ``now_ns``.

    Reading them began at that moment.

    Not those that changed a moment before, or "later"; nor those whose times were made up: before
    anybody had such files, or to the second the same for all of them.
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
    """When this process began, in ns since 1970, to about 10 ms; None where nobody says."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time_ns() - int(age_s * 1e9)
