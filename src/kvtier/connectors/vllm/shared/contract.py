"""Parts of vLLM that kvtier relies on under either of its connectors, as data.

Each connector's contract adds its own: ``offloading/contract.py``, ``kv_connector/contract.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connectors.common.contract import Takes

READ: Mapping[str, tuple[str, ...]] = {
    "EngineCore": (
        "add_lora", "remove_lora", "collective_rpc", "reset_prefix_cache", "sleep",
    ),
    "KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta"),
    "SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "preempted_req_ids",
    ),
    "NewRequestData": ("req_id", "num_computed_tokens"),
    "CachedRequestData": (
        "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens",
    ),
    "VllmConfig": (
        "kv_transfer_config", "model_config", "cache_config", "load_config", "parallel_config",
        "lora_config", "speculative_config",
    ),
    "CacheConfig": ("enable_prefix_caching",),
    "MultiModalConfig": (
        "enable_mm_embeds", "language_model_only", "mm_processor_cache_gb",
    ),
    "Request": (
        "_block_hasher", "block_hashes", "lora_request", "mm_features", "num_computed_tokens",
        "num_output_tokens", "num_prompt_tokens", "prompt_embeds", "request_id", "resumable",
    ),
    "LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "MultiModalFeatureSpec": ("mm_position",),
    "PlaceholderRange": ("offset",),
    "ModelConfig": (
        "model", "revision", "hf_config", "max_model_len", "multimodal_config", "use_mla",
    ),
    "ParallelConfig": (
        "rank", "tensor_parallel_size", "decode_context_parallel_size",
    ),
    "LoadConfig": ("load_format", "download_dir", "model_loader_extra_config"),
}  # fmt: skip
"""Fields, attributes and members that modules of both connectors read."""

CALLED: Mapping[str, Mapping[str, Takes]] = {
    "ModelConfig": {
        "get_total_num_kv_heads": Takes(),
        "get_total_num_hidden_layers": Takes(),
    },
}
"""Functions that modules of both connectors call."""

FILES = (
    "config/cache.py",
    "config/load.py",
    "config/model.py",
    "config/multimodal.py",
    "config/parallel.py",
    "config/vllm.py",
    "lora/request.py",
    "multimodal/inputs.py",
    "v1/core/sched/output.py",
    "v1/engine/core.py",
    "v1/outputs.py",
    "v1/request.py",
)
"""Files of vLLM that define the classes above."""


def with_shared(own: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return what a connector reads: ``own``, and what both connectors do."""
    names = dict.fromkeys((*READ, *own))
    return {name: (*READ.get(name, ()), *own.get(name, ())) for name in names}
