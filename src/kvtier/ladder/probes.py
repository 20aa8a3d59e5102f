"""Times of probes: small reads of blocks that are computed. See ``kvtier.plan.probe``."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvtier.ladder.transfers import Transfers
from kvtier.plan import CostModel, num_to_probe
from kvtier.telemetry import Metrics
from kvtier.telemetry.specs import PROBED_BLOCKS
from kvtier.transfer import Mover


class Probes:
    """Decides when to probe each tier.

    block_bytes: bytes of a block.
    clock: seconds.
    """

    def __init__(
        self,
        mover: Mover,
        transfers: Transfers,
        costs: CostModel,
        block_bytes: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._mover = mover
        self._transfers = transfers
        self._costs = costs
        self._block_bytes = block_bytes
        self._metrics = metrics
        self._clock = clock
        self._probed_s: dict[str, float] = {}

    def take(self, src: str, dst: str, num_declined: int) -> int:
        """Return how many blocks to read now from ``src`` to ``dst``, and count them.

        0 if no probe is due, or the tier is in use: then its reads renew the estimate.

        num_declined: number of blocks there that are computed.
        """
        route, now_s = (src, dst), self._clock()
        if not num_declined or self._transfers.num_in_flight.get(route):
            return 0
        if not self._mover.accepts(route):
            return 0
        last = self._costs.last_copy(route)
        if last is None and src not in self._mover.storages:
            return 0  # a copy that was never measured counts as free; storage may be read directly
        seen_s, last_s = last or (-inf, 0.0)
        quiet_s = now_s - max(seen_s, self._probed_s.get(src, -inf))
        num = num_to_probe(num_declined, self._block_bytes, quiet_s, last_s)
        if num:
            self._probed_s[src] = now_s
            self._metrics.count(PROBED_BLOCKS, num, src=src)
        return num
