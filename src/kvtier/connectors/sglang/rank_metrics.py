"""Whose numbers SGLang shows: it sums what its scheduler's processes have told prometheus."""

from __future__ import annotations

from kvtier.connectors.sglang.device_pools import KV
from kvtier.connectors.sglang.identity import StorageConfig
from kvtier.telemetry import Metrics


def told_metrics(config: StorageConfig, pool: str) -> Metrics:
    """For what is counted of a pool.

    Of ranks that do the same the first one speaks for all, and the pool of the KV for those beside
    it.
    """
    ranks = (config.tp_rank, config.pp_rank, config.attn_cp_rank)
    return Metrics(is_exposed=pool == KV and not any(ranks))
