"""Costs of copies and prefill, learned from measured times.

The cost of a copy of n bytes between two tiers is the moving average of seconds per byte in its
size class (powers of four: latency dominates small copies, bandwidth large ones). A class without
measurements uses the nearest one that has some. For prefill see ``prefill.py``.

A route that is believed to be slow is not used, so estimates need doubt. A single outlier moves no
estimate (``average.py``). An estimate of a size that is not copied any more gives way to newer ones
of smaller copies, so that probes (``probe.py``) of a few blocks renew all of them. A route that no
probe can use, since it ends in an engine's own memory, gets a trial: after a pause, a copy of a few
blocks counts as free, and a request makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from kvtier.plan.average import SteadyAverage, size_class
from kvtier.plan.prefill import PrefillCost, PrefillModel

DEVIATION = 3.0
"""A copy whose seconds per byte differ by more than this factor is an outlier."""
TRIAL_S = 0.5
"""Time without a copy after which a route gets a trial."""
MUCH_FASTER = 2.0
"""A probe is much faster than the last copy of a route if its seconds per byte are so many times
less."""

Route = tuple[str, str]
Witnesses = Mapping[Route, Route | None]
"""Routes that get trials. The value is a route from the same tier that probes use, if there is one:
then a trial waits until a probe was much faster."""
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
    trials: routes whose estimate is in doubt. Along them, a copy of up to ``trial_bytes`` counts as
    if it were not measured.
    """

    seconds_per_byte: Mapping[Route, Mapping[int, float]] = field(default_factory=dict)
    prefill: PrefillCost | None = None
    queued_s: Mapping[Route, float] = field(default_factory=dict)
    ways: Ways = field(default_factory=dict)
    least_s: Mapping[Route, float] = field(default_factory=dict)
    num_copies: Mapping[Route, Mapping[int, int]] = field(default_factory=dict)
    num_prefills: int = 0
    trials: frozenset[Route] = frozenset()
    trial_bytes: int = 0

    def with_trials_of(self, num_bytes: int) -> Costs:
        """Return these costs with trials of at least ``num_bytes``, for blocks that go together."""
        if not self.trials or num_bytes <= self.trial_bytes:
            return self
        return replace(self, trial_bytes=num_bytes)

    def copy_s(self, route: Route, num_bytes: int) -> float:
        """Return the estimated seconds to copy ``num_bytes`` along ``route``, without queueing.

        ``least_s`` for a route without measurements: the first copy is allowed, and measured.
        """
        if not num_bytes:
            return 0.0
        least_s = self.least_s.get(route, 0.0)
        classes = self.seconds_per_byte.get(route)
        if not classes or (route in self.trials and num_bytes <= self.trial_bytes):
            return least_s
        return max(least_s, classes[_nearest(classes, num_bytes)] * num_bytes)

    def num_measured(self, route: Route, num_bytes: int) -> int:
        """Return the number of copies behind ``copy_s``."""
        classes = self.num_copies.get(route)
        return classes[_nearest(classes, num_bytes)] if classes else 0

    def bends(self, route: Route, low: int, high: int) -> list[int]:
        """Return the sizes between ``low`` and ``high`` at which the slope of ``copy_s`` changes.

        These are the bounds of size classes, the sizes that exceed ``least_s``, and the end of a
        trial.
        """
        found = [4**power for power in range(high.bit_length() // 2 + 1)]
        if route in self.trials:
            found.append(self.trial_bytes + 1)
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
            return inf if end > first else 0.0
        return self.prefill.seconds(first, end)


class _RouteCost:
    """Seconds per byte of one route.

    seen_s: time of the last observation. last: its seconds per byte. last_s: its seconds.
    """

    __slots__ = ("_last_seen", "_num_seen", "averages", "last", "last_s", "seen_s")

    def __init__(self, now_s: float) -> None:
        self.averages: dict[int, SteadyAverage] = {}
        self.seen_s = now_s
        self.last = self.last_s = 0.0
        self._last_seen: dict[int, int] = {}
        self._num_seen = 0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """Record a copy."""
        size, new = size_class(num_bytes), seconds / num_bytes
        self.averages.setdefault(size, SteadyAverage(DEVIATION)).add(new)
        for larger, average in self.averages.items():
            # A larger copy takes no longer per byte. An estimate above a newer one is out of date,
            # if copies of that size have ceased: otherwise its own observations count.
            is_old = self._last_seen.get(larger, 0) < self._num_seen
            if larger > size and is_old and new < average.value:
                average.add(new)
        self._num_seen += 1
        self._last_seen[size] = self._num_seen
        self.seen_s, self.last, self.last_s = now_s, new, seconds


class CostModel:
    """Collects observations; ``snapshot`` returns the costs for the planner."""

    def __init__(self) -> None:
        self._copies: dict[Route, _RouteCost] = {}
        self._prefill = PrefillModel()

    def __str__(self) -> str:
        """Return the estimates as ``key=value`` pairs for a log."""
        pairs = [
            f"{src}_to_{dst}_mb_per_s="
            + ",".join(
                f"{1e-6 / known.averages[size].value:.4g}" for size in sorted(known.averages)
            )
            for (src, dst), known in self._copies.items()
        ]
        recent = self._prefill.recent
        if recent is not None and recent.token_s > 0:
            pairs.append(f"computed_tokens_per_s={1 / recent.token_s:.0f}")
        return " ".join(pairs) or "nothing was measured"

    def has_seen(self, route: Route) -> bool:
        """Whether a copy along ``route`` was ever measured."""
        return route in self._copies

    def last_copy(self, route: Route) -> tuple[float, float] | None:
        """Return when a copy along ``route`` was last measured, and its seconds."""
        known = self._copies.get(route)
        return None if known is None else (known.seen_s, known.last_s)

    def observe_copy(
        self, route: Route, num_bytes: int, seconds: float, now_s: float = 0.0
    ) -> None:
        """Record that a copy along ``route`` took ``seconds``, without its time in the queue."""
        if num_bytes > 0 and seconds > 0:
            if route not in self._copies:
                self._copies[route] = _RouteCost(now_s)
            self._copies[route].observe(num_bytes, seconds, now_s)

    def expected_copy_s(self, route: Route, num_bytes: int) -> float:
        """Return the expected time of a copy without its queue, seconds; 0 if nothing is known."""
        known = self._copies.get(route)
        if known is None or num_bytes <= 0:
            return 0.0
        return known.averages[_nearest(known.averages, num_bytes)].value * num_bytes

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
        *,
        witnesses: Witnesses | None = None,
        trial_bytes: int = 0,
        now_s: float = 0.0,
    ) -> Costs:
        """Return the current estimates; later observations do not change them.

        Args:
            queued_s, ways, least_s: see ``Costs``.
            witnesses: routes that get a trial when they were not used for a while.
            trial_bytes: bytes of a trial.
            now_s: the clock of ``observe_copy``.
        """
        copies = {
            route: {key: average.value for key, average in known.averages.items()}
            for route, known in self._copies.items()
        }
        numbers = {
            route: {key: average.num_seen for key, average in known.averages.items()}
            for route, known in self._copies.items()
        }
        trials = frozenset(
            route
            for route, witness in (witnesses or {}).items()
            if self._is_in_doubt(route, witness, now_s)
        )
        return Costs(
            copies,
            self._prefill.cost,
            dict(queued_s or {}),
            dict(ways or {}),
            dict(least_s or {}),
            numbers,
            self._prefill.num_seen,
            trials,
            trial_bytes,
        )

    def _is_in_doubt(self, route: Route, witness: Route | None, now_s: float) -> bool:
        known = self._copies.get(route)
        if known is None or now_s - known.seen_s < TRIAL_S:
            return False
        if witness is None:
            return True
        probed = self._copies.get(witness)
        is_newer = probed is not None and probed.seen_s > known.seen_s
        return probed is not None and is_newer and probed.last * MUCH_FASTER < known.last


def _nearest(classes: Collection[int], num_bytes: int) -> int:
    """Return the measured size class nearest to that of ``num_bytes``; the larger of two."""
    wanted = size_class(num_bytes)
    if wanted in classes:
        return wanted
    return min(classes, key=lambda known: (abs(known - wanted), -known))
