"""Which rank of an engine this process is, as SGLang knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel


@dataclass(slots=True)
class RankConfig:
    """What SGLang tells a storage back end as ``HiCacheStorageConfig``, for those who are not told.
    is_mla_model: False here also for such models, since every rank keeps its own pages in memory
    and on disk."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    model_name: str | None
    is_mla_model: bool = False
    extra_config: Mapping[str, object] | None = None

    @classmethod
    def of(cls, params: Any, options: object) -> RankConfig:
        """params: SGLang's ``CacheInitParams``. options: its ``ServerArgs``."""
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
    """Which of several engines this is that serve the same model beside each other; 0 for one, and
    where nobody says."""
    try:
        return get_parallel().dp_rank or 0
    except (AttributeError, RuntimeError, ValueError):  # of a part alone, or before 0.5.23
        return 0
