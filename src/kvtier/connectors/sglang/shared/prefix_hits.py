"""Find the positions at which a prompt may be cut if several pools need pages there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SidePool:
    """Pages of a prompt in a pool besides the KV.

    are_there: whether it has each page, from the first on. num_last: pages needed before a cut; 0
    for all.
    """

    are_there: Sequence[bool]
    num_last: int = 0

    def cuts(self, num_pages: int) -> list[int]:
        """Return the lengths of prefixes, in pages up to ``num_pages``, that it can restore."""
        found, in_row = [], 0
        for length, is_there in enumerate(self.are_there[:num_pages], 1):
            in_row = in_row + 1 if is_there else 0
            if in_row >= (min(self.num_last, length) or length):
                found.append(length)
        return found


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Prefixes of a prompt that all pools can restore.

    cuts: lengths of these prefixes in pages, ascending; a range if there is one pool. by_pool: the
    longest prefix of each pool alone, without pools that have none.
    """

    cuts: Sequence[int]
    by_pool: Mapping[str, int]

    @property
    def longest(self) -> int:
        return self.cuts[-1] if self.cuts else 0


def common_hits(kv: tuple[str, int], sides: Mapping[str, SidePool]) -> PrefixHits:
    """Return the hits that all pools have in common.

    kv: name of the KV pool, and how many of the first pages it has. sides: the other pools.
    """
    name, num_pages = kv
    common: Sequence[int] = range(1, num_pages + 1)
    by_pool = {name: num_pages} if num_pages else {}
    for side, pool in sides.items():
        own = pool.cuts(num_pages)
        if own:
            by_pool[side] = own[-1]
        common = sorted(set(common).intersection(own))
    return PrefixHits(common, by_pool)
