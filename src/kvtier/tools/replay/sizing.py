"""Find the sizes of host memory and disk that pay for themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.tools.replay.assumptions import GIB, HOURS_PER_MONTH, Machine
from kvtier.tools.replay.policies import ReplayHits
from kvtier.tools.replay.savings import Prompts, Savings
from kvtier.tools.replay.trace import Ints, Trace

NUM_SIZES = 11
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Point:
    """One size of one tier, with all other tiers unchanged.

    Attributes:
        num_bytes, num_blocks: the size.
        hit_ratio: share of all blocks found in any tier.
        tokens_per_s: tokens that need not be computed, beyond those of the other tiers.
        seconds_per_hour: accelerator seconds saved per hour, beyond those of the other tiers.
        saved, price: value of that time, and cost of the tier, per hour.
        gain_per_gib, price_per_gib: value and cost per month of each GiB added to the next smaller
            size. A larger disk may wear less.
        written_per_day: bytes written per day.
        supported: whether the trace fills this size often enough.
    """

    num_bytes: int
    num_blocks: int
    hit_ratio: float
    tokens_per_s: float
    seconds_per_hour: float
    saved: float
    price: float
    gain_per_gib: float
    price_per_gib: float
    written_per_day: float
    supported: bool

    @property
    def drive_writes(self) -> float:
        return self.written_per_day / self.num_bytes if self.num_bytes else 0.0

    @property
    def net(self) -> float:
        """Value less cost, per hour."""
        return self.saved - self.price


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """The sizes with the highest net value. at_edge: whether larger ones can't be evaluated."""

    host: Point | None
    disk: Point | None
    savings: Savings
    at_edge: bool

    @property
    def net(self) -> float:
        return sum(point.net for point in (self.host, self.disk) if point is not None)


def usual_sizes(unique_bytes: int, least_bytes: int) -> list[int]:
    """Return powers of two above ``least_bytes``, up to the first that holds all blocks."""
    top = 1 << max(0, (unique_bytes - 1).bit_length())
    found = [top >> power for power in range(NUM_SIZES - 1, -1, -1)]
    return [each for each in found if each > least_bytes]


class Sizing:
    """Evaluation of sizes for one trace and machine.

    Args:
        trace: the trace.
        machine: figures from which savings are computed.
        device: blocks that each request finds in the engine's own pool, int64 [num_requests].
        hits: return the hits of a tier with a number of blocks.
        num_supported: largest size, in blocks, that the trace can tell about.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        device: Ints,
        hits: Callable[[int], ReplayHits],
        num_supported: int,
    ) -> None:
        self._trace, self._machine = trace, machine
        self.prompts = Prompts(trace, machine)
        self._device = device
        self._hits = hits
        self._num_supported = num_supported
        self._none = np.zeros_like(device)
        self.block_bytes = trace.block_tokens * machine.bytes_per_token
        self.without = self.prompts.savings(device, self._none, self._none)

    def host_curve(self, num_bytes: Sequence[int]) -> list[Point]:
        """Evaluate host memory of each size, without a disk."""
        machine = self._machine
        return self._curve(
            num_bytes,
            lambda found: self.prompts.savings(self._device, found, self._none),
            self._device,
            self.without,
            lambda _: machine.host_price_per_hour,
        )

    def disk_curve(self, num_bytes: Sequence[int], host: int) -> list[Point]:
        """Evaluate a disk of each size below ``host`` bytes of host memory."""
        above = self._found(host)
        return self._curve(
            num_bytes,
            lambda found: self.prompts.savings(self._device, above, found),
            np.maximum(self._device, above),
            self.prompts.savings(self._device, above, self._none),
            self._machine.disk_price_per_hour,
        )

    def choose(self, host_bytes: Sequence[int], disk_bytes: Sequence[int]) -> SizeChoice:
        """Return the sizes of host memory and disk, or none of it, with the highest net value."""
        hosts: list[Point | None] = [None, *self.host_curve(host_bytes)]
        best = self._choice(None, None)
        for host in hosts:
            size = 0 if host is None else host.num_bytes
            larger = [each for each in disk_bytes if each > size]
            disks: list[Point | None] = [None, *self.disk_curve(larger, size)]
            for disk in disks:
                choice = self._choice(host, disk)
                if choice.net > best.net:
                    best = choice
        return best

    def _choice(self, host: Point | None, disk: Point | None) -> SizeChoice:
        bought = [point for point in (host, disk) if point is not None]
        largest = max((point.num_blocks for point in bought), default=0)
        in_host, on_disk = (
            self._none if point is None else self._found(point.num_bytes) for point in (host, disk)
        )
        savings = self.prompts.savings(self._device, in_host, on_disk)
        return SizeChoice(host, disk, savings, at_edge=2 * largest > self._num_supported)

    def _curve(
        self,
        num_bytes: Sequence[int],
        savings: Callable[[Ints], Savings],
        found_above: Ints,
        without: Savings,
        price_per_hour: Callable[[float], float],
    ) -> list[Point]:
        """Evaluate the sizes of one tier.

        Args:
            num_bytes: the sizes, ascending.
            savings: return the savings for the blocks found in the tier.
            found_above: blocks that each request finds in the tiers above.
            without: savings without this tier.
            price_per_hour: return the price of a GiB from its full writes per hour.
        """
        num_before, before_s, before_price = 0, without.total_s, 0.0
        points = []
        for each in num_bytes:
            num_blocks = each // self.block_bytes
            hits = self._hits(num_blocks)
            saved = savings(hits.found)
            seconds = saved.total_s
            written = self._per_s(hits.num_stored * float(self.block_bytes))
            price = each / GIB * price_per_hour(3600 * written / each)
            per_gib = HOURS_PER_MONTH / ((each - num_before) / GIB)
            points.append(
                Point(
                    each,
                    num_blocks,
                    float(np.maximum(found_above, hits.found).sum() / self._trace.num_references),
                    self._per_s(float((saved.tokens - without.tokens).sum())),
                    3600 * self._per_s(seconds - without.total_s),
                    self._money(seconds - without.total_s),
                    price,
                    self._money(seconds - before_s) * per_gib,
                    (price - before_price) * per_gib,
                    written * DAY_S,
                    num_blocks <= self._num_supported,
                )
            )
            num_before, before_s, before_price = each, seconds, price
        return points

    def _found(self, num_bytes: int) -> Ints:
        return self._hits(num_bytes // self.block_bytes).found if num_bytes else self._none

    def _per_s(self, amount: float) -> float:
        window_s = self._trace.window_s
        return amount / window_s if window_s else 0.0

    def _money(self, seconds: float) -> float:
        """Return the value per hour of accelerator seconds saved over the whole trace."""
        return self._per_s(seconds) * self._machine.accelerator_price
