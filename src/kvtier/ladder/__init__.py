"""The ladder of tiers: decides on residency, transfers and eviction for every engine."""

from __future__ import annotations

from kvtier.ladder.cost_metrics import CostMetrics
from kvtier.ladder.ladder import Ladder
from kvtier.ladder.lookup_batch import WantedBlocks
from kvtier.ladder.options import LadderCallbacks, LadderOptions
from kvtier.ladder.prefetch import Prefetch
from kvtier.ladder.storage_lookup import PendingLookup

__all__ = [
    "CostMetrics",
    "Ladder",
    "LadderCallbacks",
    "LadderOptions",
    "PendingLookup",
    "Prefetch",
    "WantedBlocks",
]
