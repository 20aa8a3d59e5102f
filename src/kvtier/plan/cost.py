"""Costs of copies and prefill, learned from measured times.

The cost of a copy of n bytes between two tiers is the moving average of seconds per byte in its
size class (powers of four: latency dominates small copies, bandwidth large ones). A class without
measurements uses the nearest one that has some. For prefill see ``prefill.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvtier.plan.average import Average, size_class
from kvtier.plan.prefill import PrefillCost, PrefillModel

Route = tuple[str, str]
Ways = Mapping[str, tuple[Route, ...]]
"""Per tier, the copies that bring a block from there to the device, in order."""


def ways_of(memories: Sequence[str], storages: Sequence[str], direct: Container[str]) -> Ways:
    """Return the ways of the tiers.

    memories: fastest first; blocks are copied from one to the next.
    storages: blocks are read into the slowest of the memories.
    direct: storages that are read directly into the fastest memory.
    """
    steps = [(slow, fast) for fast, slow in pairwise(memories)]
    ways = {slow: tuple(reversed(steps[: at + 1])) for at, (slow, _) in enumerate(steps)}
    for storage in storages:
        ways[storage] = ((storage, memories[-1]), *reversed(steps))
        if storage in direct:
            ways[storage] = ((storage, memories[0]),)
    return ways


@dataclass(frozen=True, slots=True)
class Costs:
    """Snapshot of the costs that a plan is made from.

    seconds_per_byte: per route and size class.
    prefill: None while unknown.
    queued_s: per route, the work already queued; infinite if the route is unusable.
    ways: copies from each tier to the device.
    least_s: per route, the minimum duration of a copy, also before one was measured.
    num_copies: number of measurements behind each of ``seconds_per_byte``.
    num_prefills: number of measurements behind ``prefill``.
    """

    seconds_per_byte: Mapping[Route, Mapping[int, float]] = field(default_factory=dict)
    prefill: PrefillCost | None = None
    queued_s: Mapping[Route, float] = field(default_factory=dict)
    ways: Ways = field(default_factory=dict)
    least_s: Mapping[Route, float] = field(default_factory=dict)
    num_copies: Mapping[Route, Mapping[int, int]] = field(default_factory=dict)
    num_prefills: int = 0

    def copy_s(self, route: Route, num_bytes: int) -> float:
        """Return the estimated seconds to copy ``num_bytes`` along ``route``, without queueing.

        ``least_s`` for a route without measurements: the first copy is allowed, and measured.
        """
        if not num_bytes:
            return 0.0
        least_s = self.least_s.get(route, 0.0)
        classes = self.seconds_per_byte.get(route)
        if not classes:
            return least_s
        return max(least_s, classes[_nearest(classes, num_bytes)] * num_bytes)

    def num_measured(self, route: Route, num_bytes: int) -> int:
        """Return the number of copies behind ``copy_s``."""
        classes = self.num_copies.get(route)
        return classes[_nearest(classes, num_bytes)] if classes else 0

    def bends(self, route: Route, low: int, high: int) -> list[int]:
        """Return the sizes between ``low`` and ``high`` at which the slope of ``copy_s`` changes.

        These are the bounds of size classes, and the sizes that exceed ``least_s``.
        """
        found = [4**power for power in range(high.bit_length() // 2 + 1)]
        least_s = self.least_s.get(route, 0.0)
        if least_s:
            rates = self.seconds_per_byte.get(route, {}).values()
            found += [int(least_s / seconds) + 1 for seconds in rates]
        return [size for size in found if low < size <= high]

    def load_s(self, num_bytes: Mapping[str, int]) -> float:
        """Return the estimated seconds to bring bytes from their tiers to the device.

        num_bytes: per source tier. The queue of a tier counts even with 0 bytes: blocks in flight
        arrive only after it.
        """
        totals: dict[Route, int] = {}
        for tier, total in num_bytes.items():
            for route in self.ways[tier]:
                totals[route] = totals.get(route, 0) + total
        return sum(
            self.copy_s(route, total) + self.queued_s.get(route, 0.0)
            for route, total in totals.items()
        )

    def prefill_s(self, first: int, end: int) -> float:
        """Return the estimated seconds to compute the tokens ``first`` up to ``end`` of a prompt.

        Infinite while unknown.
        """
        if self.prefill is None:
            return float("inf") if end > first else 0.0
        return self.prefill.seconds(first, end)


class CostModel:
    """Collects observations; ``snapshot`` returns the costs for the planner."""

    def __init__(self) -> None:
        self._copies: dict[Route, dict[int, Average]] = {}
        self._prefill = PrefillModel()

    def has_seen(self, route: Route) -> bool:
        """Whether a copy along ``route`` was ever measured."""
        return route in self._copies

    def observe_copy(self, route: Route, num_bytes: int, seconds: float) -> None:
        """Record that a copy along ``route`` took ``seconds``, without its time in the queue."""
        if num_bytes > 0 and seconds > 0:
            classes = self._copies.setdefault(route, {})
            classes.setdefault(size_class(num_bytes), Average()).add(seconds / num_bytes)

    def expected_copy_s(self, route: Route, num_bytes: int) -> float:
        """Return the expected time of a copy without its queue, seconds; 0 if nothing is known."""
        classes = self._copies.get(route)
        if not classes or num_bytes <= 0:
            return 0.0
        return classes[_nearest(classes, num_bytes)].value * num_bytes

    def expected_prefill_s(self, first: int, end: int) -> float:
        """Return the expected prefill time by the latest estimate, seconds; 0 if there is none.

        The estimate may be some observations old: this call fits nothing.
        """
        recent = self._prefill.recent
        return 0.0 if recent is None else recent.seconds(first, end)

    @property
    def recent_prefill(self) -> PrefillCost | None:
        """Latest estimate, the same object until there is a new one; None if there is none.

        This property fits nothing by itself, apart from ``PrefillModel.recent``.
        """
        return self._prefill.recent

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Record that computing ``num_tokens`` after ``num_before`` others took ``seconds``."""
        self._prefill.observe(num_before, num_tokens, seconds)

    def snapshot(
        self,
        queued_s: Mapping[Route, float] | None = None,
        ways: Ways | None = None,
        least_s: Mapping[Route, float] | None = None,
    ) -> Costs:
        """Return the current estimates; later observations do not change them."""
        copies = {
            route: {key: average.value for key, average in classes.items()}
            for route, classes in self._copies.items()
        }
        numbers = {
            route: {key: average.num_seen for key, average in classes.items()}
            for route, classes in self._copies.items()
        }
        return Costs(
            copies,
            self._prefill.cost,
            dict(queued_s or {}),
            dict(ways or {}),
            dict(least_s or {}),
            numbers,
            self._prefill.num_seen,
        )


def _nearest(classes: Collection[int], num_bytes: int) -> int:
    """Return the measured size class nearest to that of ``num_bytes``; the larger of two."""
    wanted = size_class(num_bytes)
    if wanted in classes:
        return wanted
    return min(classes, key=lambda known: (abs(known - wanted), -known))
