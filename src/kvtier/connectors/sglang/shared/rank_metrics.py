"""Choice of the rank whose metrics are exposed, since SGLang sums those of all its processes."""

from __future__ import annotations

from kvtier.connectors.sglang.shared.device_pools import KV
from kvtier.connectors.sglang.shared.identity import StorageConfig
from kvtier.observe import Metrics


def pool_metrics(config: StorageConfig, pool: str) -> Metrics:
    """Return the metrics of a pool.

    They are exposed only on the first of the ranks that do the same, and only for the KV pool.
    """
    ranks = (config.tp_rank, config.pp_rank, config.attn_cp_rank)
    return Metrics(is_exposed=pool == KV and not any(ranks))
