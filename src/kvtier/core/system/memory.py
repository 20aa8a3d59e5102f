"""Memory that this process may still allocate."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.core.system.control_groups import own_groups, read_number, read_text


class Hierarchy(NamedTuple):
    """One version of control groups, and its files for memory.

    controller: its name in ``/proc/self/cgroup``, "" for version 2.
    mount: where the groups are.
    limit, usage: file names.
    cached: line of ``memory.stat`` that counts cached files.
    """

    controller: str
    mount: str
    limit: str
    usage: str
    cached: str


HIERARCHIES = (
    Hierarchy("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    Hierarchy(
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Control groups of version 2 and 1."""


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes left, and what limits them: the machine's free memory or a control group.

    The process's own group counts, and each group above it: a limit holds for all groups below.

    root: where ``proc`` and ``sys`` are mounted. Without either, the limit is unknown and large.
    """
    limits: list[tuple[int, str]] = []
    free_kib = _field(root / "proc/meminfo", "MemAvailable:")
    if free_kib is not None:
        limits.append((free_kib * 1024, "free memory of the machine"))
    for hierarchy in HIERARCHIES:
        for name in own_groups(root, hierarchy.controller):
            group = root / hierarchy.mount / name.relative_to("/")
            limit, usage = (
                read_number(group / hierarchy.limit),
                read_number(group / hierarchy.usage),
            )
            if limit is not None and usage is not None:
                # The kernel frees cached files on demand, for example a model that was just read.
                used = max(0, usage - (_field(group / "memory.stat", hierarchy.cached) or 0))
                limits.append((limit - used, f"memory limit of the control group {name}"))
    return min(limits, default=(1 << 62, "no limit known"))


def trim_heap() -> None:
    """Give memory that was freed back to the machine, where the C library can (glibc).

    It keeps what threads have freed otherwise. Takes some 50 ms per GiB.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def total_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return the total bytes, used or not, and what limits them, as ``available_bytes`` does.

    root: where ``proc`` and ``sys`` are mounted.
    """
    limits: list[tuple[int, str]] = []
    total_kib = _field(root / "proc/meminfo", "MemTotal:")
    if total_kib is not None:
        limits.append((total_kib * 1024, "memory of the machine"))
    for hierarchy in HIERARCHIES:
        for name in own_groups(root, hierarchy.controller):
            limit = read_number(root / hierarchy.mount / name.relative_to("/") / hierarchy.limit)
            if limit is not None:
                limits.append((limit, f"memory limit of the control group {name}"))
    return min(limits, default=(1 << 62, "no limit known"))


def _field(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file of "name number" lines; None if missing."""
    for line in read_text(path).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return None
