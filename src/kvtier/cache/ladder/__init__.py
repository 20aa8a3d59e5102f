"""The ladder of tiers: decides on residency, transfers and eviction for every engine."""

from __future__ import annotations

from kvtier.cache.ladder.cost_metrics import CostMetrics
from kvtier.cache.ladder.ladder import Ladder
from kvtier.cache.ladder.lookup_batch import WantedBlocks
from kvtier.cache.ladder.options import LadderCallbacks, LadderOptions
from kvtier.cache.ladder.prefetch import Prefetch
from kvtier.cache.ladder.storage_lookup import PendingLookup

__all__ = [
    "CostMetrics",
    "Ladder",
    "LadderCallbacks",
    "LadderOptions",
    "PendingLookup",
    "Prefetch",
    "WantedBlocks",
]
