"""Rank of this process in its engine, according to SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel


@dataclass(slots=True)
class RankConfig:
    """Replacement of ``HiCacheStorageConfig`` for the linker, to which SGLang passes none.

    is_mla_model: False for MLA models, too, since every rank keeps its own pages in memory and on
    disk.
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
    extra_config: Mapping[str, object] | None = None

    @classmethod
    def of(cls, params: Any, options: object) -> RankConfig:
        """Return the rank's configuration.

        params: SGLang's ``CacheInitParams``. options: its ``ServerArgs``.
        """
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
    try:
        return get_parallel().dp_rank or 0
    except (AttributeError, RuntimeError, ValueError):  # no engine, or before 0.5.23
        return 0
