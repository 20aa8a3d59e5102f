"""Find the positions at which a prompt may be cut if several pools need pages there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def side_cuts(are_there: Sequence[bool], num_last: int, num_pages: int) -> list[int]:
    """Return the lengths of prefixes, in pages, that a pool besides the KV can restore.

    Args:
        are_there: whether the pool has each page of the prompt, from the first on.
        num_last: pages needed before a cut; 0 for all.
        num_pages: longest prefix.
    """
    found, in_row = [], 0
    for length, is_there in enumerate(are_there[:num_pages], 1):
        in_row = in_row + 1 if is_there else 0
        if in_row >= (min(num_last, length) or length):
            found.append(length)
    return found


def common_cuts(num_pages: int, sides: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the cuts that all pools have in common, ascending; a range if KV is the only pool.

    num_pages: how many of the first pages the KV pool has. sides: ``side_cuts`` of the other pools.
    """
    if not sides:
        return range(1, num_pages + 1)
    return sorted(set(range(1, num_pages + 1)).intersection(*sides.values()))
