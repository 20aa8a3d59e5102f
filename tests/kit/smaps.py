"""The kernel's view of this process's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")


class Mapping(NamedTuple):
    """One line of ``/proc/self/maps``. is_dumped: whether core dumps have it, by its flags."""

    start: int
    end: int
    mode: str
    is_dumped: bool


def mappings() -> Iterator[Mapping]:
    """Yield the mappings of this process, ascending."""
    start = end = 0
    mode = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            start, end, mode = int(head[1], 16), int(head[2], 16), head[3]
        elif line.startswith("VmFlags:"):
            yield Mapping(start, end, mode, "dd" not in line.split())


def is_dumped(address: int, num_bytes: int) -> bool:
    """Whether a core dump has any page of this memory."""
    end = address + num_bytes
    found = [mapping for mapping in mappings() if mapping.start < end and mapping.end > address]
    assert sum(min(each.end, end) - max(each.start, address) for each in found) == num_bytes
    return any(each.is_dumped for each in found)
