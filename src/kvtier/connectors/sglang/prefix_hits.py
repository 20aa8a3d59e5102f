"""Find the positions at which a prompt may be cut if several pools need pages there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SidePool:
    """Pages that a pool beside the KV has of a prompt.

    are_there: for each page of the chain, from its beginning. num_last: pages needed before a cut;
    0 for all.
    """

    are_there: Sequence[bool]
    num_last: int = 0

    def cuts(self, num_pages: int) -> list[int]:
        """Lengths of prefixes, in pages and up to ``num_pages``, that it can restore."""
        found, in_row = [], 0
        for length, is_there in enumerate(self.are_there[:num_pages], 1):
            in_row = in_row + 1 if is_there else 0
            if in_row >= (min(self.num_last, length) or length):
                found.append(length)
        return found


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Prefixes of a prompt that all pools can restore.

    cuts: lengths of prefixes that all pools can restore, ascending; a range where there is one
    pool. by_pool: the longest one of each alone; pools that have none are not named.
    """

    cuts: Sequence[int]
    by_pool: Mapping[str, int]

    @property
    def longest(self) -> int:
        return self.cuts[-1] if self.cuts else 0


def common_hits(kv: tuple[str, int], sides: Mapping[str, SidePool]) -> PrefixHits:
    """Return the hits that all pools have in common.

    kv: name of the pool that all others stand beside, and how many of the first pages it has.
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
