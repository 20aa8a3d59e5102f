"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

CONTROL_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Versions 2 and 1: folder, file of the limit, file of the usage, line of cached files."""


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes left, and what limits them: the machine's free memory or the control group.

    root: where ``proc`` and ``sys`` are mounted. Without either, the limit is unknown and large.
    """
    limits: list[tuple[int, str]] = []
    free_kib = _field(root / "proc/meminfo", "MemAvailable:")
    if free_kib is not None:
        limits.append((free_kib * 1024, "free memory of the machine"))
    for folder, limit_file, usage_file, cached in CONTROL_GROUPS:
        group = root / folder
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None:
            # The kernel gives cached files up when asked; a model that was just read is one.
            used = max(0, usage - (_field(group / "memory.stat", cached) or 0))
            limits.append((limit - used, "memory limit of the control group"))
    return min(limits, default=(1 << 62, "no limit known"))


def _number(path: Path) -> int | None:
    """The only number in a file; None where there is no file, or a word such as "max" in it."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    """The number after ``name`` in a file of "name number" lines; None where there is none."""
    for line in _read(path).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
