"""Parts of vLLM that the scheduler on a grid relies on, as data."""

from __future__ import annotations

from kvtier.connectors.common.contract import Contract, Takes

VLLM = Contract(
    "vLLM",
    "vllm",
    oldest="0.28",
    newest="0.32",
    run_with=("0.28", "0.32"),
    files=(
        "config/scheduler.py", "config/speculative.py", "v1/core/kv_cache_coordinator.py",
        "v1/core/kv_cache_manager.py",
        "v1/core/sched/async_scheduler.py", "v1/core/sched/scheduler.py",
        "v1/kv_cache_interface.py", "v1/request.py",
    ),
    overridden={
        "Scheduler": {"_mamba_block_aligned_split": Takes(
            "request, num_new_tokens, num_new_local_computed_tokens=, "
            "num_external_computed_tokens=")},
        "KVCacheManager": {
            "get_computed_blocks": Takes("request"),
            "allocate_slots": Takes(
                "request, num_new_tokens, num_new_computed_tokens=, new_computed_blocks=, "
                "num_lookahead_tokens=, num_external_computed_tokens=, delay_cache_blocks=, "
                "num_encoder_tokens=, full_sequence_must_fit=, reserved_blocks=, "
                "has_scheduled_reqs=, skip_zeroing_group_ids="
            ),
            "cache_blocks": Takes("request, num_computed_tokens"),
        },
    },
    called={
        "KVCacheManager": {
            "create_kv_cache_blocks": Takes("blocks"),
            "truncate_computed_blocks": Takes("blocks, num_computed_tokens"),
        },
        "KVCacheCoordinator": {
            "find_longest_cache_hit": Takes("block_hashes, max_cache_hit_length")},
    },
    read={
        "AsyncScheduler": (),
        "KVCacheConfig": ("has_mamba_layers",),
        "KVCacheCoordinator": ("retention_interval",),
        "KVCacheManager": ("coordinator",),
        "Request": ("mm_features", "num_computed_tokens", "num_prompt_tokens", "resumable"),
        "Scheduler": ("kv_cache_manager", "max_num_scheduled_tokens", "num_prefill_lookahead",
                      "need_mamba_block_aligned_split", "num_spec_tokens", "scheduler_config"),
        "SchedulerConfig": ("async_scheduling", "enable_chunked_prefill", "max_num_seqs",
                            "long_prefill_token_threshold", "max_num_batched_tokens"),
        "SpeculativeConfig": ("max_num_new_slots_for_drafting",),
    },
)  # fmt: skip
