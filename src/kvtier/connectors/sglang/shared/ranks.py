"""This process among the ranks of its engine: its pools' capacities, folders and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvtier.core.errors import ConfigError
from kvtier.observe import Metrics
from kvtier.observe.specs import MetricSpec

if TYPE_CHECKING:
    from prometheus_client import Counter

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""SGLang's names of pools."""
SLOT_BYTES = 4096
"""Alignment of a page's slot in storage."""


@dataclass(slots=True)
class RankConfig:
    """The part of SGLang's ``HiCacheStorageConfig`` that kvtier uses.

    SGLang passes one to a storage back end, and none to a linker, which makes it by ``of``.

    is_mla_model: False for the linker, since every rank keeps its own pages in memory and on disk.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    model_name: str | None
    is_mla_model: bool = False

    @classmethod
    def of(cls, params: Any, options: object) -> RankConfig:
        """Return the rank's configuration.

        params: SGLang's ``CacheInitParams``. options: its ``ServerArgs``.
        """
        import torch

        rank, size = 0, 1
        group = params.attn_tp_cache_group or params.tp_cache_group
        if group is not None and torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        return cls(
            rank,
            size,
            params.pp_rank,
            params.pp_size,
            params.attn_cp_rank,
            params.attn_cp_size,
            getattr(options, "dcp_size", 1) or 1,
            getattr(options, "model_path", None),
        )


def replica_of() -> int:
    """Return the number of this engine among replicas of one model.

    0 for a single engine, or if unknown.
    """
    from sglang.srt.runtime_context import get_parallel

    try:
        return get_parallel().dp_rank or 0
    except (AttributeError, RuntimeError, ValueError):  # no engine, or before 0.5.23
        return 0


def is_replicated(config: RankConfig, name: str) -> bool:
    """Whether all ranks of a tensor-parallel group have the same bytes in a pool.

    If so, the first rank stores them for all. The states of recurrent layers are always split.
    """
    return config.is_mla_model and name != MAMBA


def folder_of(config: RankConfig, name: str, replica: int = 0) -> str:
    """Return the name of a slab's folder.

    Replicas, pools, and ranks with pages of their own have one each. replica: number of the engine
    among independent replicas; ``config.dp_rank`` of data-parallel attention is separate from it.
    """
    tp_rank = 0 if is_replicated(config, name) else config.tp_rank
    parts = [
        ("replica", replica, replica + 1),
        ("dp", dp_rank := getattr(config, "dp_rank", 0), dp_rank + 1),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
        ("tp", tp_rank, config.tp_size),
    ]
    place = "-".join(f"{part}{rank}" for part, rank, size in parts if size > 1) or "rank0"
    return f"{place}-{name}"


def pool_metrics(config: RankConfig, pool: str) -> Metrics:
    """Return the metrics of a pool; only the first rank exposes them, and only for the KV pool.

    SGLang adds up the metrics of all its processes, and all ranks count the same.
    """
    return Metrics(is_exposed=pool == KV and is_first(config))


def is_first(config: RankConfig) -> bool:
    """Whether a rank reports for all that share its requests."""
    return not (config.tp_rank or config.pp_rank or config.attn_cp_rank)


@cache
def counter(spec: MetricSpec) -> Counter:
    """Return the counter of a metric that SGLang's exposition includes."""
    # Imported as late as SGLang does: only then the environment has the multi-process directory.
    from prometheus_client import Counter

    return Counter(spec.name, spec.meaning, spec.labels)


def slot_bytes(page_bytes: int) -> int:
    """Return the bytes that a page takes in storage."""
    return -(-page_bytes // SLOT_BYTES) * SLOT_BYTES


def pool_capacities(
    setting: str,
    num_bytes: int,
    config: RankConfig,
    options: object,
    page_bytes: Mapping[str, int],
) -> dict[str, int]:
    """Return this rank's capacity for each pool, in bytes. All pools get the same number of pages.

    Args:
        setting: name of the setting that gives ``num_bytes``, for messages.
        num_bytes: capacity of all ranks on this machine.
        config: this rank.
        options: SGLang's ``ServerArgs``, or None.
        page_bytes: bytes per page of each pool.

    Raises:
        ConfigError: the capacity is below one page.
    """
    replicas: int = getattr(options, "dp_size", 1) or 1
    machines: int = getattr(options, "nnodes", 1) or 1
    groups = config.pp_size * config.attn_cp_size * replicas / machines
    slots = {name: slot_bytes(num) for name, num in page_bytes.items()}
    bytes_per_page = sum(
        num * (1 if is_replicated(config, name) else config.tp_size) * groups
        for name, num in slots.items()
    )
    num_pages = int(num_bytes / bytes_per_page)
    if num_pages < 1:
        raise ConfigError(
            f"{setting}: {num_bytes} bytes are below one page of all ranks and pools "
            f"({bytes_per_page:.0f} bytes); raise it"
        )
    return {name: num_pages * num for name, num in slots.items()}
