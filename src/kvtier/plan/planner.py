"""Load or recompute: the cheapest way to get a prompt's KV onto the device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from kvtier.core.grouping import runs_of
from kvtier.core.hot import Numbers
from kvtier.core.types import DEVICE, HOST, BlockId, GroupMatch
from kvtier.plan.cost import Costs, Route
from kvtier.plan.needs import GroupCapacity, NeedKind, Stretch, coming_runs, stretches
from kvtier.plan.operations import MAX_COMPARED, Copy, Cut, Plan

WORTH_IT = 0.9
"""Share of the seconds of the best other plan that a plan from both ends takes at most. A smaller
gain is less certain than the estimates."""
WORTH_S = 0.05
"""Seconds that a plan from both ends saves at least."""
MAX_CHUNKS = 1024
"""Most bounds of chunks of a plan from both ends: each chunk has a copy of its own."""


def plan_groups(
    match: GroupMatch,
    costs: Costs,
    rooms: Sequence[GroupCapacity],
    *,
    num_tokens: int,
    block_size: int,
    grain_blocks: int = 1,
    deadline_s: float | None = None,
    from_both_ends: bool = False,
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
    from_both_ends: whether the engine can compute the prefix from its front, chunk by chunk of
    ``grain_blocks``, while it is loaded from its end. Only for a match of one group.

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
    plan = Plan(
        tuple(copies),
        best.num_blocks,
        best.load_s,
        best.recompute_s,
        all_recompute_s,
        _spread(compared),
        cuts[-1] - best.num_blocks if cuts else 0,
    )
    if not from_both_ends or not compared:
        return plan
    return _from_both_ends(plan, compared[-1], match, loads, block_size, grain_blocks)


def _from_both_ends(
    plan: Plan, cut: Cut, match: GroupMatch, loads: _Loads, block_size: int, grain_blocks: int
) -> Plan:
    """Return a plan that computes the front of a prefix and loads its end, if it beats ``plan``.

    A chunk needs all KV before it, so chunks are computed forwards, and loaded backwards until both
    meet. Where they meet is found by the engine, and is estimated here: where both have taken
    equally long. Blocks up to the first whole chunk in storage are loaded before all others.

    The longest ``cut`` is the best one, since computing a part that is loaded at the same time
    takes less than computing it later. A first read from storage is always made in this way: if it
    turns out to be slow, the engine computes most of the prefix.
    """
    costs, end = loads.costs, cut.num_blocks
    tiers = [tier or DEVICE for tier in match.tiers[0][:end]]
    first = next((at for at, tier in enumerate(tiers) if tier != DEVICE), end)
    stored = next((at for at, tier in enumerate(tiers) if tier not in (DEVICE, HOST)), end)
    begin = -(-stored // grain_blocks) * grain_blocks
    chunks = range(begin, end + 1, grain_blocks)
    if costs.prefill is None or not 2 < len(chunks) <= MAX_CHUNKS:
        return plan
    runs = list(runs_of(tiers[first:], first))
    sources = {tier for tier, _ in runs}
    if DEVICE in sources or any(match.in_flight[0][first:end]):
        return plan

    def load_s(start: int, end: int = end) -> float:
        return loads.seconds_between(runs, start, end)

    def compute_s(at: int) -> float:
        return costs.prefill_s(begin * block_size, at * block_size)

    at = bisect_left(chunks, True, key=lambda at: compute_s(at) >= load_s(at))
    meet = min(chunks[max(0, at - 1) : at + 1], key=lambda at: max(compute_s(at), load_s(at)))
    first_s = load_s(first, begin)
    found = replace(
        plan,
        copies=_copies_from_end(match.blocks, tiers, first, chunks),
        num_reused_blocks=end,
        load_s=first_s + load_s(meet),
        recompute_s=compute_s(meet) + cut.recompute_s,
        num_declined_blocks=plan.num_reused_blocks + plan.num_declined_blocks - end,
        from_both_ends=True,
        num_claimed_blocks=meet - begin,
        overlap_s=min(compute_s(meet), load_s(meet)),
    )
    is_late = loads.deadline_s is not None and found.load_s > loads.deadline_s
    saved_s, least_s = plan.seconds - found.seconds, (1 - WORTH_IT) * plan.seconds
    if not all(costs.ways[tier][0] in costs.seconds_per_byte for tier in sources - {HOST}):
        saved_s, least_s = compute_s(end) / 2, 0.0  # as if the storage were as fast as computing
    return plan if is_late or saved_s <= max(least_s, WORTH_S) else found


def _copies_from_end(
    blocks: Sequence[BlockId], tiers: Sequence[str], first: int, chunks: range
) -> tuple[Copy, ...]:
    """Return the copies of the blocks from ``first`` on, chunk by chunk, the last one first.

    chunks: the bounds of the chunks. What is before them is copied before them.
    """
    bounds = [*pairwise(chunks)][::-1]
    return tuple(
        Copy(tier, DEVICE, blocks[run.start : run.stop])
        for start, end in ((first, chunks.start), *bounds)
        for tier, run in runs_of(tiers[start:end], start)
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

    def seconds_between(self, runs: Sequence[tuple[str, range]], start: int, end: int) -> float:
        """Return the seconds to load the blocks of the first group from ``start`` up to ``end``.

        runs: of its blocks in one tier, none of them on the device.
        """
        num_bytes: dict[str, int] = {}
        for tier, run in runs:
            num = min(run.stop, end) - max(run.start, start)
            if num > 0:
                size = num * self.rooms[0].bytes_per_block
                num_bytes[tier] = num_bytes.get(tier, 0) + size
        return self.costs.load_s(num_bytes)

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
