"""Blocks that each cut needs from below the device, as piecewise linear functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvtier.core.grouping import runs_of
from kvtier.core.types import DEVICE, GroupMatch


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """Inputs of a plan about one group of layers.

    num_free_slots: slots on the device that are free or evictable.
    num_staging_slots: the same of the tier below, through which blocks of lower tiers pass; None
    for no limit.
    num_last: number of the last blocks before a cut that it needs: None for all (full attention),
    1 for the state of recurrent layers.
    """

    bytes_per_block: int
    num_free_slots: int
    num_staging_slots: int | None = None
    num_last: int | None = None


class NeedKind(NamedTuple):
    """Kind of block: its group, its source tier, and whether it is in flight already."""

    group: int
    tier: str
    in_flight: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """Cuts ``start + 1`` up to ``end``, between which each step changes the needs in the same way.

    counts: blocks of each kind that the cut at ``start`` needs.
    slopes: change of the counts per step.
    """

    start: int
    end: int
    counts: Mapping[NeedKind, int]
    slopes: Mapping[NeedKind, int]

    def counts_at(self, cut: int) -> dict[NeedKind, int]:
        """Return the blocks of each kind that ``cut`` needs, without kinds of 0."""
        steps = cut - self.start
        found = {kind: num + steps * self.slopes[kind] for kind, num in self.counts.items()}
        return {kind: num for kind, num in found.items() if num}


def coming_runs(match: GroupMatch, group: int) -> Iterator[tuple[NeedKind, range]]:
    """Yield the runs of a group's blocks that are not on the device."""
    tiers, in_flight = match.tiers[group], match.in_flight[group]
    for tier, run in runs_of(tiers):
        if tier is not None and tier != DEVICE:
            for is_coming, part in runs_of(in_flight[run.start : run.stop], run.start):
                yield NeedKind(group, tier, is_coming), part


def stretches(match: GroupMatch, rooms: Sequence[GroupCapacity]) -> Iterator[Stretch]:
    r"""Yield all cuts of a match, in order, as stretches.

    If a group needs its last W blocks, a run enters with its first block and leaves W blocks later.

        needed blocks of a run     ____/-----\____
                                      ^     ^ start + W
                                      start
    """
    bends: dict[int, Counter[NeedKind]] = {0: Counter(), match.num_blocks: Counter()}
    for group, room in enumerate(rooms):
        for kind, run in coming_runs(match, group):
            _bend(bends, kind, run, +1)
            if room.num_last is not None:
                gone = range(run.start + room.num_last, run.stop + room.num_last)
                _bend(bends, kind, gone, -1)
    counts: Counter[NeedKind] = Counter()
    slopes: Counter[NeedKind] = Counter()
    places = sorted(place for place in bends if place <= match.num_blocks)
    for start, end in pairwise(places):
        slopes.update(bends[start])
        counts.update(dict.fromkeys(slopes, 0))  # include every kind
        yield Stretch(start, end, counts.copy(), slopes.copy())
        for kind, slope in slopes.items():
            counts[kind] += (end - start) * slope


def _bend(bends: dict[int, Counter[NeedKind]], kind: NeedKind, run: range, slope: int) -> None:
    bends.setdefault(run.start, Counter())[kind] += slope
    bends.setdefault(run.stop, Counter())[kind] -= slope
