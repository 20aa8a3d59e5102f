"""vLLM's schedulers, with prompts cut on a grid, and with hits and cached blocks in whole cells.

vLLM cuts prompts at multiples of a block for models with recurrent layers ("mamba align"), in one
method of its scheduler, which is replaced here. A cell that does not fit into what is left of a
step waits for the next one.
"""

from __future__ import annotations

from typing import Any, Self

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvtier.connectors.vllm.shared.grid import end_on_grid, grids_of
from kvtier.connectors.vllm.shared.settings import VllmSettings


class GridCacheManager(KVCacheManager):
    """vLLM's pool, which caches and finds whole cells of prompts only."""

    grid: int
    """Tokens in a cell."""

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        blocks, num_tokens, boundary = super().get_computed_blocks(request)
        while rest := num_tokens % self.grid:
            num_tokens -= rest
            if len(blocks.blocks) == 1:
                blocks = self.truncate_computed_blocks(blocks, num_tokens)
            else:  # a shorter prefix needs earlier blocks of a window, which may be evicted
                found, num_tokens, _ = self.coordinator.find_longest_cache_hit(
                    request.block_hashes, num_tokens
                )
                blocks = self.create_kv_cache_blocks(found)
        return blocks, num_tokens, boundary

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        delay_cache_blocks: bool = False,
        **more: Any,
    ) -> KVCacheBlocks | None:
        """Allocate as vLLM does, but have ``cache_blocks`` cache."""
        more["delay_cache_blocks"] = True
        sizes = num_new_tokens, num_new_computed_tokens
        blocks: KVCacheBlocks | None = super().allocate_slots(request, *sizes, **more)
        if blocks is not None and not delay_cache_blocks:
            num_tokens = sum(sizes) + more.get("num_external_computed_tokens", 0)
            self.cache_blocks(request, request.num_computed_tokens + num_tokens)
        return blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        super().cache_blocks(request, min(num_computed_tokens, end_on_grid(request, self.grid)))


class GridScheduler(Scheduler):
    """vLLM's scheduler on the grid of kvtier's settings; an asynchronous one where vLLM wants that.

    Raises ``ConfigError`` where a cell could never be computed as a whole.
    """

    cuts_on_grid = True

    def __new__(cls, vllm_config: Any, *more: Any, **named: Any) -> Self:
        is_async = vllm_config.scheduler_config.async_scheduling
        kind: Any = AsyncGridScheduler if is_async and cls is GridScheduler else cls
        made: Self = super().__new__(kind)
        return made

    def __init__(self, vllm_config: Any, *more: Any, **named: Any) -> None:
        super().__init__(vllm_config, *more, **named)
        transfers, drafts = vllm_config.kv_transfer_config, vllm_config.speculative_config
        grids = grids_of(transfers.kv_connector_extra_config if transfers else {})
        self.grid, config = max(grids), self.scheduler_config
        slots = drafts.max_num_new_slots_for_drafting if drafts else 0
        others = (config.max_num_seqs - 1) * (1 + self.num_spec_tokens + slots) + slots
        room = min(self.max_num_scheduled_tokens, config.max_num_batched_tokens) - others
        room = min(room, config.long_prefill_token_threshold or room)
        if not all(grids) or len(grids) > 1:
            raise VllmSettings.wrong("GridScheduler needs the same grid in every connector")
        if not config.enable_chunked_prefill or self.num_prefill_lookahead > 1:
            raise VllmSettings.wrong("grid needs chunked prefill and no draft that looks ahead")
        if self.grid > room:
            raise VllmSettings.wrong(
                f"grid: a cell of {self.grid} tokens does not fit into a step, which has {room} "
                "for a prompt beside other requests; lower grid or max_num_seqs, or raise "
                "max_num_batched_tokens or long_prefill_token_threshold"
            )
        self.need_mamba_block_aligned_split = True
        # Not another object: connectors have this one.
        self.kv_cache_manager.__class__ = GridCacheManager
        self.kv_cache_manager.grid = self.grid
        # By default vLLM keeps a window only before the prompt's last block. Hits end with cells,
        # so the window before the end of each cell is needed, too.
        self.kv_cache_manager.coordinator.retention_interval = self.grid

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return how many of the tokens to compute: to the end of a cell or prompt, or 0."""
        num_cached = num_new_local_computed_tokens + num_external_computed_tokens
        start = request.num_computed_tokens + num_cached
        # The tokens that a preempted request had generated are computed again with its prompt.
        prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prompt_end:
            return num_new_tokens
        cell_end = (start // self.grid + 1) * self.grid
        end = min(start + num_new_tokens, cell_end)
        return end - start if end >= min(cell_end, prompt_end) else 0


class AsyncGridScheduler(GridScheduler, AsyncScheduler):
    """``GridScheduler`` that schedules a step before the one before has ended."""
