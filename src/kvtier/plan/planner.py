"""Load or recompute: the cheapest way to get a prompt's KV onto the device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from kvtier.core.hot import Numbers
from kvtier.core.types import DEVICE, BlockId, GroupMatch
from kvtier.plan.cost import Costs, Route
from kvtier.plan.needs import GroupCapacity, NeedKind, Stretch, coming_runs, stretches
from kvtier.plan.operations import MAX_COMPARED, Copy, Cut, Plan


def plan_groups(
    match: GroupMatch,
    costs: Costs,
    rooms: Sequence[GroupCapacity],
    *,
    num_tokens: int,
    block_size: int,
    grain_blocks: int = 1,
    deadline_s: float | None = None,
) -> Plan:
    """Choose how much of the cached prefix to reuse.

    For every possible cut c (a multiple of ``grain_blocks``) the cost is

        load(blocks that c needs, of each group, that are not on the device)
        + prefill(c * block_size up to num_tokens)

    The cheapest cut wins; of equal ones the longest. Blocks in flight to the device cost the rest
    of their copy, estimated by its queue.

    rooms: one per group of the match.
    num_tokens: length of the prompt. The cut leaves at least one token to compute, for its logits.
    deadline_s: a load with a longer estimate is not begun.

    The cut found is optimal. The load's cost is linear between the points where a run of blocks
    begins or ends, a copy reaches another size class, or a limit is reached. Prefill costs a linear
    term minus a square, so the sum is lowest at one of the two ends.

    Cost: O(blocks) to find the runs of similar blocks, and a few microseconds for each run.
    """
    cuts = _on_the_grid(match.cuts, grain_blocks, (num_tokens - 1) // block_size)
    loads = _Loads(costs, rooms, deadline_s)
    best = Cut(0, 0.0, costs.prefill_s(0, num_tokens))
    all_recompute_s = best.recompute_s
    compared: list[Cut] = []
    for stretch in stretches(match, rooms):
        for at, load_s in loads.candidates(stretch, cuts):
            cut = Cut(at, load_s, costs.prefill_s(at * block_size, num_tokens))
            compared.append(cut)
            if cut.seconds <= best.seconds:
                best = cut
    copies = [
        copy
        for group, room in enumerate(rooms)
        for copy in _copies(match, group, room, best.num_blocks)
    ]
    return Plan(
        tuple(copies),
        best.num_blocks,
        best.load_s,
        best.recompute_s,
        all_recompute_s,
        _spread(compared),
        cuts[-1] - best.num_blocks if cuts else 0,
    )


def _spread(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return at most ``MAX_COMPARED`` of the cuts, including the last one."""
    step = -(-len(cuts) // MAX_COMPARED) or 1
    return tuple(cuts[::-step][::-1])


def _on_the_grid(cuts: Sequence[int], grain_blocks: int, longest: int) -> Sequence[int]:
    """Return the cuts that are multiples of ``grain_blocks``, up to ``longest``."""
    cuts = cuts[: bisect_right(cuts, longest)]
    if grain_blocks == 1:
        return cuts
    if isinstance(cuts, range):
        first = -(-cuts.start // grain_blocks) * grain_blocks
        return range(first, cuts.stop, grain_blocks)
    return [cut for cut in cuts if cut % grain_blocks == 0]


@dataclass(frozen=True, slots=True)
class _Loads:
    """Cost of loading the blocks that a cut needs."""

    costs: Costs
    rooms: Sequence[GroupCapacity]
    deadline_s: float | None

    def candidates(self, stretch: Stretch, cuts: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield the ``cuts`` of a stretch that may be cheapest, ascending, with load seconds.

        These are the ends of linear pieces, as far as room and deadline allow.
        """
        for first, end in pairwise([*self._edges(stretch), stretch.end + 1]):
            low, high = bisect_left(cuts, first), bisect_left(cuts, end) - 1
            if low > high or not self._has_room(stretch.counts_at(cuts[low])):
                continue
            for at in self._in_time(stretch, cuts, low, high):
                load_s = self._load_s(stretch, cuts[at])
                if load_s < inf:  # infinite: a route is unusable
                    yield cuts[at], load_s

    def _edges(self, stretch: Stretch) -> list[int]:
        """Return the first cut of each linear piece, ascending."""
        edges = {stretch.start + 1, stretch.end}
        if stretch.end - stretch.start > 2:
            for base, slope, sizes in (*self._routes(stretch), *self._limits(stretch)):
                edges.update(stretch.start + _steps(base, slope, size) for size in sizes)
        return sorted(edge for edge in edges if stretch.start < edge <= stretch.end)

    def _routes(self, stretch: Stretch) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield per route: bytes at the start, bytes per step, and where the slope changes."""
        before, step = self._route_bytes(stretch.counts), self._route_bytes(stretch.slopes)
        for route, slope in step.items():
            if slope:
                ends = sorted(
                    (before[route], before[route] + slope * (stretch.end - stretch.start))
                )
                yield before[route], slope, self.costs.bends(route, *ends)

    def _route_bytes(self, counts: Mapping[NeedKind, int]) -> dict[Route, int]:
        num_bytes: dict[Route, int] = {}
        for kind, num in counts.items():
            size = 0 if kind.in_flight else num * self.rooms[kind.group].bytes_per_block
            for route in self.costs.ways[kind.tier]:
                num_bytes[route] = num_bytes.get(route, 0) + size
        return num_bytes

    def _limits(self, stretch: Stretch) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield per limit: the bounded value at the start, its growth per step, and its bound."""
        used, step = self._slots(stretch.counts), self._slots(stretch.slopes)
        for before, slope, limit in zip(used, step, self._most(), strict=True):
            if slope and limit is not None:
                yield before, slope, (limit + 1,)

    def _slots(self, counts: Mapping[NeedKind, int]) -> list[int]:
        """Return, per group, the device slots and the staging slots that the blocks need."""
        used = [0] * (2 * len(self.rooms))
        for kind, num in counts.items():
            if not kind.in_flight:
                used[2 * kind.group] += num
                used[2 * kind.group + 1] += num * (len(self.costs.ways[kind.tier]) > 1)
        return used

    def _most(self) -> list[int | None]:
        return [
            limit for room in self.rooms for limit in (room.num_free_slots, room.num_staging_slots)
        ]

    def _has_room(self, counts: Mapping[NeedKind, int]) -> bool:
        pairs = zip(self._slots(counts), self._most(), strict=True)
        return all(limit is None or used <= limit for used, limit in pairs)

    def _in_time(
        self, stretch: Stretch, cuts: Sequence[int], low: int, high: int
    ) -> tuple[int, ...]:
        """Return the ends of the range in ``cuts[low : high + 1]`` whose load meets the deadline.

        A longer copy may be faster: large copies have a better rate.
        """

        def is_late(at: int) -> bool:
            return self.deadline_s is not None and self._load_s(stretch, cuts[at]) > self.deadline_s

        if is_late(low) and is_late(high):
            return ()
        if is_late(low):
            low = bisect_left(range(high), True, lo=low, key=lambda at: not is_late(at))
        elif is_late(high):
            high = bisect_left(range(high), True, lo=low, key=is_late) - 1
        return (low, high) if low < high else (low,)

    def _load_s(self, stretch: Stretch, cut: int) -> float:
        num_bytes: dict[str, int] = {}
        for kind, num in stretch.counts_at(cut).items():
            size = 0 if kind.in_flight else num * self.rooms[kind.group].bytes_per_block
            num_bytes[kind.tier] = num_bytes.get(kind.tier, 0) + size
        return self.costs.load_s(num_bytes)


def _steps(base: int, slope: int, size: int) -> int:
    """Return after how many steps of ``slope`` from ``base`` the value has crossed ``size``.

    Rising: it is at or above ``size``. Falling: it is below.
    """
    return -((base - size) // slope) if slope > 0 else (base - size) // -slope + 1


def _copies(match: GroupMatch, group: int, room: GroupCapacity, cut: int) -> list[Copy]:
    """Return one copy per source tier, for blocks neither on the device nor in flight to it."""
    sources: dict[str, list[Sequence[BlockId]]] = {}
    first = 0 if room.num_last is None else max(0, cut - room.num_last)
    for kind, run in coming_runs(match, group):
        start, end = max(run.start, first), min(run.stop, cut)
        if not kind.in_flight and start < end:
            sources.setdefault(kind.tier, []).append(match.blocks[start:end])
    return [Copy(src, DEVICE, Numbers.joined(*runs), group) for src, runs in sources.items()]
