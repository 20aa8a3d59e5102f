"""What copies and prefill cost, learnt from what they really took.

A copy of n bytes between two tiers is estimated from the moving average of seconds per byte in its
size class (powers of four: small copies pay for latency, large ones for bandwidth). A class not
seen yet borrows from the nearest one that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvtier.types import DEVICE, HOST

SMOOTHING = 0.2
"""Weight of the newest observation: about ten observations to forget an old regime. The first few
count alike: the very first one has often paid for something that comes only once."""

Route = tuple[str, str]


def size_class(num_bytes: int) -> int:
    """Powers of four: 0 for up to 3 bytes, 10 for 1 to 4 MiB."""
    return (max(num_bytes, 1).bit_length() - 1) // 2


@dataclass(frozen=True, slots=True)
class Costs:
    """A snapshot that a plan is made from.

    seconds_per_byte: per route and size class. prefill_s_per_token: None while unknown.
    queued_s: per route, work that stands in line already. tiers: fastest first; a block goes from
    tier to tier.
    """

    seconds_per_byte: Mapping[Route, Mapping[int, float]] = field(default_factory=dict)
    prefill_s_per_token: float | None = None
    queued_s: Mapping[Route, float] = field(default_factory=dict)
    tiers: tuple[str, ...] = (DEVICE, HOST)

    def copy_s(self, route: Route, num_bytes: int) -> float:
        """Estimated seconds to copy ``num_bytes`` along ``route``, without waiting in line.

        0 for a route never measured: the first copy is allowed, and measured.
        """
        classes = self.seconds_per_byte.get(route)
        if not num_bytes or not classes:
            return 0.0
        wanted = size_class(num_bytes)
        nearest = min(classes, key=lambda known: (abs(known - wanted), -known))
        return classes[nearest] * num_bytes

    def load_s(self, num_bytes: Mapping[str, int]) -> float:
        """Estimated seconds to bring bytes from where they are to the device.

        num_bytes: per tier that blocks come from. Its line counts for a tier that is named, even
        with 0 bytes: blocks on their way arrive when their turn comes.
        """
        seconds, total, is_used = 0.0, 0, False
        for slow, fast in pairwise(reversed(self.tiers)):
            total += num_bytes.get(slow, 0)
            is_used = is_used or slow in num_bytes
            if is_used:
                seconds += self.copy_s((slow, fast), total) + self.queued_s.get((slow, fast), 0.0)
        return seconds

    def prefill_s(self, num_tokens: int) -> float:
        """Estimated seconds to compute ``num_tokens`` of a prompt; infinite while unknown."""
        if self.prefill_s_per_token is None:
            return float("inf") if num_tokens else 0.0
        return self.prefill_s_per_token * num_tokens


class _Average:
    """A moving average: of all observations at first, of the newest ones later."""

    __slots__ = ("num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0

    def add(self, new: float) -> None:
        self.num_seen += 1
        self.value += max(SMOOTHING, 1 / self.num_seen) * (new - self.value)


class CostModel:
    """Collects observations; ``snapshot`` gives what the planner needs."""

    def __init__(self) -> None:
        self._copies: dict[Route, dict[int, _Average]] = {}
        self._prefill = _Average()

    def observe_copy(self, route: Route, num_bytes: int, seconds: float) -> None:
        """A copy along ``route`` took ``seconds``, without the time it stood in line."""
        if num_bytes > 0 and seconds > 0:
            classes = self._copies.setdefault(route, {})
            classes.setdefault(size_class(num_bytes), _Average()).add(seconds / num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Computing ``num_tokens`` of a prompt took ``seconds``."""
        if num_tokens > 0 and seconds > 0:
            self._prefill.add(seconds / num_tokens)

    def snapshot(
        self,
        queued_s: Mapping[Route, float] | None = None,
        tiers: tuple[str, ...] = (DEVICE, HOST),
    ) -> Costs:
        """The estimates as they are now; later observations don't change it."""
        copies = {
            route: {key: average.value for key, average in classes.items()}
            for route, classes in self._copies.items()
        }
        prefill = self._prefill.value if self._prefill.num_seen else None
        return Costs(copies, prefill, dict(queued_s or {}), tiers)
