"""Parts of vLLM that kvtier's own connector relies on, as data. It needs no ``v1/kv_offload``."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connectors.common.contract import Contract, Takes

OLDEST, NEWEST = "0.18", "0.33"
"""Oldest and newest version whose sources fulfil the contract."""
RUN_WITH = ("0.23",)
"""Versions that the tests were run under."""

CONNECTOR = "distributed/kv_transfer/kv_connector/v1"

OVERRIDDEN: Mapping[str, Mapping[str, Takes]] = {
    "KVConnectorBase_V1": {
        "__init__": Takes("vllm_config, role, kv_cache_config"),
        "register_kv_caches": Takes("kv_caches"),
        "start_load_kv": Takes("forward_context, **"),
        "wait_for_layer_load": Takes("layer_name"),
        "save_kv_layer": Takes("layer_name, kv_layer, attn_metadata, **"),
        "wait_for_save": Takes(),
        "get_finished": Takes("finished_req_ids"),
        "get_block_ids_with_load_errors": Takes(),
        "build_connector_worker_meta": Takes(),
        "on_new_request": Takes("request"),
        "get_num_new_matched_tokens": Takes("request, num_computed_tokens"),
        "update_state_after_alloc": Takes("request, blocks, num_external_tokens"),
        "build_connector_meta": Takes("scheduler_output"),
        "update_connector_output": Takes("connector_output"),
        "request_finished": Takes("request, block_ids"),
        "has_pending_push_work": Takes(),
        "take_events": Takes(),
        "get_kv_connector_stats": Takes(),
        "build_kv_connector_stats": Takes("data="),
        "build_prom_metrics": Takes(
            "vllm_config, metric_types, labelnames, per_engine_labelvalues"
        ),
        "reset_cache": Takes(),
        "shutdown": Takes(),
    },
    "KVConnectorWorkerMetadata": {"aggregate": Takes("other")},
    "KVConnectorStats": {
        "aggregate": Takes("other"),
        "reduce": Takes(),
        "reset": Takes(),
        "is_empty": Takes(),
    },
    "KVConnectorPromMetrics": {
        "__init__": Takes("vllm_config, metric_types, labelnames, per_engine_labelvalues"),
        "observe": Takes("transfer_stats_data, engine_idx="),
    },
    "Scheduler": {"has_finished_requests": Takes()},
}
"""vLLM calls these, and kvtier has its own: what vLLM may pass must be known."""

CALLED: Mapping[str, Mapping[str, Takes]] = {
    "KVConnectorBase_V1": {"_get_connector_metadata": Takes()},
    "KVCacheBlocks": {"get_block_ids": Takes()},
}
"""kvtier calls these: they must take what it passes, and want nothing more."""

BUILT: Mapping[str, tuple[str, ...]] = {
    "KVConnectorStats": ("data",),
}
"""kvtier makes these from the fields named, in this order."""

READ: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "KVConnectorPromMetrics": (
        "_counter_cls", "_gauge_cls", "_histogram_cls", "per_engine_labelvalues",
    ),
    "Scheduler": ("connector",),
    "KVConnectorRole": ("SCHEDULER", "WORKER"),
    "KVConnectorOutput": ("kv_connector_worker_meta",),
    "KVConnectorMetadata": (),
    "SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
        "total_num_scheduled_tokens", "scheduled_spec_decode_tokens",
    ),
    "NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    "KVCacheConfig": ("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    "KVCacheTensor": ("size",),
    "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "FullAttentionSpec": ("block_size", "page_size_bytes", "real_page_size_bytes"),
    "MLAAttentionSpec": ("block_size", "page_size_bytes", "real_page_size_bytes"),
    "VllmConfig": (
        "kv_transfer_config", "model_config", "cache_config", "load_config", "parallel_config",
        "speculative_config", "kv_events_config",
    ),
    "CacheConfig": (
        "block_size", "cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo",
    ),
    "MultiModalConfig": (
        "enable_mm_embeds", "language_model_only", "mm_processor_cache_gb",
    ),
    "ParallelConfig": (
        "rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size",
        "decode_context_parallel_size", "data_parallel_rank", "data_parallel_size",
    ),
    "Request": (
        "block_hashes", "kv_transfer_params", "lora_request", "mm_features", "num_computed_tokens",
        "num_output_tokens", "num_prompt_tokens", "num_tokens", "prompt_embeds", "request_id",
        "resumable", "skip_reading_prefix_cache",
    ),
    "LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "MultiModalFeatureSpec": ("mm_position",),
    "PlaceholderRange": ("offset",),
    "ModelConfig": (
        "model", "revision", "hf_config", "max_model_len", "multimodal_config", "dtype",
    ),
    "LoadConfig": ("load_format", "download_dir", "model_loader_extra_config"),
}  # fmt: skip
"""kvtier reads these fields, attributes and members."""

OPTIONAL = frozenset(
    {"KVConnectorBase_V1.on_new_request", "KVConnectorBase_V1.has_pending_push_work"}
)
"""Not in every version: vLLM tells of new requests from 0.23 on, and asks from 0.25 on whether a
connector has work."""

FILES = (
    "distributed/kv_events.py",
    f"{CONNECTOR}/base.py",
    f"{CONNECTOR}/metrics.py",
    "config/cache.py",
    "config/load.py",
    "config/model.py",
    "config/multimodal.py",
    "config/parallel.py",
    "config/vllm.py",
    "lora/request.py",
    "multimodal/inputs.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/sched/output.py",
    "v1/core/sched/scheduler.py",
    "v1/kv_cache_interface.py",
    "v1/outputs.py",
    "v1/request.py",
)
"""Files of vLLM that define the classes above."""

VLLM = Contract(
    "vLLM",
    "vllm",
    OLDEST,
    NEWEST,
    RUN_WITH,
    FILES,
    overridden=OVERRIDDEN,
    called=CALLED,
    built=BUILT,
    read=READ,
    optional=OPTIONAL,
)
