"""Setting ``grid``: prompts are cut, cached and reused at multiples of so many tokens only.

A *cell* is the part of a prompt between two such multiples. ``grid/scheduler.py`` has vLLM compute
each cell in a step of its own. A hit then ends where a cell begins, and what follows is computed in
the same pieces as without it, so that its bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from kvtier.connectors.vllm.shared.settings import VllmSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SCHEDULER: Final = "kvtier.connectors.vllm.entry.GridScheduler"
"""Value of vLLM's ``--scheduler-cls``."""


def grids_of(extra: Mapping[str, Any]) -> set[int]:
    """Return the grid of a connector in tokens, or of all connectors inside it; 0 stands for none.

    extra: of ``kv_connector_extra_config``.
    """
    inside = [each.get("kv_connector_extra_config") or {} for each in extra.get("connectors") or ()]
    return set().union(*map(grids_of, inside)) if inside else {int(extra.get("grid") or 0)}


def settle_grid(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Make a block of kvtier as long as a cell.

    Raises ``ConfigError`` for an engine whose hits could differ from misses.
    """
    extra = config.kv_transfer_config.kv_connector_extra_config
    settings, groups = VllmSettings.read(extra), kv_cache_config.kv_cache_groups
    if not (grid := settings.grid):
        return
    if kv_cache_config.has_mamba_layers:
        raise settings.wrong("grid serves no models with recurrent layers")
    parallel = config.parallel_config
    page = lcm(*(group.kv_cache_spec.block_size for group in groups))
    page *= parallel.decode_context_parallel_size
    page *= getattr(parallel, "prefill_context_parallel_size", 1)
    if grid % page:
        raise settings.wrong(f"grid: {grid} is no multiple of {page}, vLLM's block size")
    if "blocks_per_chunk" in extra or extra.setdefault("block_size", grid) != grid:
        raise settings.wrong(
            f"grid: {grid} is the length of a block, too; leave block_size and blocks_per_chunk out"
        )
    if not getattr(config.scheduler_config.get_scheduler_cls(), "cuts_on_grid", False):
        raise settings.wrong(f"grid: {grid} needs vLLM's option --scheduler-cls {SCHEDULER}")


def end_on_grid(request: Request, grid: int) -> int:
    """Return how many of a request's first tokens are computed in whole cells, and can be reused.

    Generated tokens are computed one by one, parts of a session as they come, and an image or what
    follows it where the encoder has room.
    """
    if request.resumable:
        return 0
    offsets = [int(feature.mm_position.offset) for feature in request.mm_features or ()]
    num_tokens: int = min([request.num_prompt_tokens, *offsets])
    return num_tokens // grid * grid
