"""Report the events of a lease to metrics, cost account, reuse sampler and block events."""

from __future__ import annotations

import logging
from collections import Counter

from kvtier.cache.ladder import Ladder
from kvtier.cache.lease import Lease
from kvtier.core.grouping import runs_of
from kvtier.core.types import DEVICE, Match
from kvtier.layout import KVGroup
from kvtier.observe.block_events import BlockLog
from kvtier.observe.specs import LATE_LOADS
from kvtier.plan import Plan

logger = logging.getLogger(__name__)


class LeaseObserver:
    """Observer of leases. The cache calls it on its thread, once at each point of a lease's life.

    It changes only the lease's record.

    group: of its blocks. events: publishes blocks that enter and leave tiers; None for no events.
    """

    def __init__(self, ladder: Ladder, group: KVGroup, events: BlockLog | None) -> None:
        self._metrics = ladder.metrics
        self._ladder = ladder
        self._group = group
        self._events = events

    def planned(self, lease: Lease, plan: Plan) -> None:
        """Report a lease that holds the prefix of its plan and its own slots; no copy has begun."""
        lease.record.load_bytes = plan.num_copied_blocks * self._group.bytes_per_block
        lease.record.hit_blocks = lease.hit_blocks
        num_elsewhere = 0
        for tier, run in runs_of(lease.held):
            if tier != DEVICE:
                num_elsewhere += len(run)
                some = slice(run.start, run.stop)
                self._ladder.on_admit(map(hash, lease.labels[some]), lease.blocks[some])
        num = plan.num_claimed_blocks
        self._ladder.costs.planned(num_elsewhere - num, plan.num_declined_blocks + num)

    def computes(self, lease: Lease, chunk: range) -> None:
        """Report that the engine computes blocks of the prefix, which are not loaded then."""
        lease.claimed.append(chunk)
        for tier, num in Counter(lease.held[chunk.start : chunk.stop]).items():
            lease.record.hit_blocks[tier] -= num
        lease.record.load_bytes -= len(chunk) * self._group.bytes_per_block

    def found(self, lease: Lease, match: Match) -> None:
        """Report the prefix that a request found.

        Matches in storage may be known only now. The lease holds the part that its plan keeps.
        """
        if self._events is not None:
            self._events.prompt(lease.namespace, lease.labels, lease.blocks, match.tiers)

    def computed(self, lease: Lease, num_new: int) -> None:
        """Report that the cache has taken over the lease's last ``num_new`` blocks."""
        new = slice(lease.num_shared - num_new, lease.num_shared)
        self._ladder.on_admit(map(hash, lease.labels[new]), lease.blocks[new])
        if self._events is not None:
            here = (DEVICE,) * lease.num_shared
            self._events.prompt(lease.namespace, lease.labels, lease.blocks, here)

    def late(self, lease: Lease, after_s: float) -> None:
        """Report that a lease's load was given up. after_s: time that it took until then."""
        self._metrics.count(LATE_LOADS)
        logger.warning("load given up after_s=%.3f", after_s)

    def ended(self, lease: Lease) -> None:
        """Report that the lease's request has ended, successfully or not."""
        self._metrics.record(lease.record)
        if not lease.broken:
            saved = sum(lease.record.hit_blocks.values()) * self._group.block_size
            self._ladder.costs.saved(0, saved, lease.record.load_s)
