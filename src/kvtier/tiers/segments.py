"""Segments of an arena, page-locked one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks of an arena. offset: where they begin. num_bytes: in whole pages."""

    offset: int
    num_bytes: int
    num_blocks: int


def cut_segments(
    num_blocks: int, bytes_per_block: int, first_bytes: int, segment_bytes: int, page_bytes: int
) -> list[Segment]:
    """Segments that cover ``num_blocks`` blocks, in order: the first of about ``first_bytes``, the
    others of ``segment_bytes`` at most.

    Each ends where a page and a block end: drivers lock whole pages, and refuse a copy that runs
    over two registrations. Blocks that share ends with pages only every few GiB may make a segment
    larger than asked for, for it can't be smaller than that. Only the last one is rounded up.
    """
    step = page_bytes // gcd(page_bytes, bytes_per_block)  # blocks from one common end to the next
    segments = []
    done = 0
    while done < num_blocks:
        limit = segment_bytes if done else min(first_bytes, segment_bytes)
        steps = max(1, limit // (step * bytes_per_block))
        num = min(steps * step, num_blocks - done)
        num_bytes = -(-num * bytes_per_block // page_bytes) * page_bytes
        segments.append(Segment(done * bytes_per_block, num_bytes, num))
        done += num
    return segments
