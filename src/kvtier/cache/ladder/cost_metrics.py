"""Planned blocks, their expected cost, and the outcome, as metrics; what policies learn of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf

from kvtier.index import BlockIndex
from kvtier.observe import Metrics
from kvtier.observe.specs import (
    ACTUAL_LOAD_SECONDS,
    ACTUAL_PREFILL_SECONDS,
    COPIED_BYTES,
    COPY_SECONDS,
    HIT_BLOCKS,
    LOAD_ERROR_RATIO,
    PLANNED_BLOCKS,
    PREDICTED_LOAD_SECONDS,
    PREDICTED_PREFILL_SECONDS,
    SAVED_SECONDS,
    SAVED_TOKENS,
)
from kvtier.plan import CostModel, PrefillCost, Route

logger = logging.getLogger(__name__)

DECLINED_LOG_S = 60.0
"""Shortest interval between two lines about blocks that are found and computed."""
CHANGED = 1.25
"""Factor by which the cost of a later block must change before the policies hear of it again."""


class CostMetrics:
    """Records predicted and actual costs. Owned by the thread that plans, copies and computes.

    A call takes one to five microseconds. There is one call per plan, copy and piece of prefill.

    clock: seconds.
    """

    def __init__(
        self, metrics: Metrics, costs: CostModel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._costs = costs
        self._clock = clock
        self.expected_prefill_s = costs.expected_prefill_s
        self._unpaid_s = 0.0
        self._num_declined = 0
        self._logged_s = -inf

    def planned(self, num_loaded: int, num_recomputed: int) -> None:
        """Count a request's blocks below the device: to be loaded, and to be recomputed."""
        if num_loaded:
            self._metrics.count(PLANNED_BLOCKS, num_loaded, decision="load")
        if num_recomputed:
            self._metrics.count(PLANNED_BLOCKS, num_recomputed, decision="recompute")
            self._log_declined(num_recomputed)

    def _log_declined(self, num_blocks: int) -> None:
        self._num_declined += num_blocks
        now_s = self._clock()
        if now_s - self._logged_s >= DECLINED_LOG_S:
            logger.info(
                "found and computed, not loaded blocks=%d reason=loading seems slower %s",
                self._num_declined,
                self._costs,
            )
            self._logged_s, self._num_declined = now_s, 0

    def hit(self, tier: str, num_blocks: int) -> None:
        """Count blocks that a request reuses, by the tier in which they were found."""
        if num_blocks:
            self._metrics.count(HIT_BLOCKS, num_blocks, tier=tier)

    def loaded(self, src: str, expected_s: float, actual_s: float) -> None:
        """Record a finished copy from ``src`` towards the device.

        Args:
            src: the source tier.
            expected_s: duration predicted when the copy began; 0 if there was no prediction.
            actual_s: duration of the copy.
        """
        if expected_s <= 0 or actual_s <= 0:
            return
        self._metrics.count(PREDICTED_LOAD_SECONDS, expected_s, src=src)
        self._metrics.count(ACTUAL_LOAD_SECONDS, actual_s, src=src)
        self._metrics.observe(LOAD_ERROR_RATIO, actual_s / expected_s, src=src)

    def moved(self, route: Route, num_bytes: int, seconds: float) -> None:
        """Record a copy that an engine made itself between its device and memory."""
        src, dst = route
        self._metrics.count(COPIED_BYTES, num_bytes, src=src, dst=dst)
        self._metrics.observe(COPY_SECONDS, seconds, src=src, dst=dst)

    def observe_copy(self, route: Route, num_bytes: int, seconds: float) -> None:
        """Record a copy that an engine made itself towards the device, and learn its cost."""
        self.loaded(route[0], self._costs.expected_copy_s(route, num_bytes), seconds)
        self._costs.observe_copy(route, num_bytes, seconds, self._clock())

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Record that ``num_tokens`` after ``num_before`` others were computed in ``seconds``."""
        expected_s = self._costs.expected_prefill_s(num_before, num_before + num_tokens)
        self._costs.observe_prefill(num_before, num_tokens, seconds)
        if expected_s > 0 and seconds > 0 and num_tokens > 0:
            self._metrics.count(PREDICTED_PREFILL_SECONDS, expected_s)
            self._metrics.count(ACTUAL_PREFILL_SECONDS, seconds)

    def saved(self, first: int, end: int, waited_s: float) -> None:
        """Record the prefill time saved by a request that reused tokens ``first`` to ``end``.

        A load that took longer than computing is subtracted from later savings, since a counter
        can't decrease.
        """
        if end <= first:
            return
        self._metrics.count(SAVED_TOKENS, end - first)
        computing_s = self._costs.expected_prefill_s(first, end)
        if computing_s <= 0:  # not measured yet
            return
        self._unpaid_s += waited_s - computing_s
        if self._unpaid_s < 0:
            self._metrics.count(SAVED_SECONDS, -self._unpaid_s)
            self._unpaid_s = 0.0


class RecomputeWeight:
    """Reports to the policies how the cost of recomputing a block grows with its depth.

    Later blocks of a prompt take longer. The planner measures the cost. Until it has, or if the
    cost does not grow, all blocks weigh the same.

    block_size: tokens per block.
    """

    def __init__(self, index: BlockIndex, costs: CostModel, block_size: int) -> None:
        self._index = index
        self._costs = costs
        self._block_size = block_size
        self._seen: PrefillCost | None = None
        self._reported = 0.0

    def update(self) -> None:
        """Report the measured cost to the policies if it has changed. Constant time."""
        cost = self._costs.recent_prefill
        if cost is None or cost is self._seen:
            return
        self._seen = cost
        at_blocks = cost.doubles_at_tokens / self._block_size
        if self._reported / CHANGED <= at_blocks <= self._reported * CHANGED:
            return
        self._reported = at_blocks
        self._index.set_recompute_slope(at_blocks)
