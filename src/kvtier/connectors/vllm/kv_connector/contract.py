"""Parts of vLLM that kvtier's own connector relies on, as data. It needs no ``v1/kv_offload``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvtier.connectors.common.contract import Contract, Takes
from kvtier.connectors.vllm.shared.contract import CALLED as SHARED_CALLED
from kvtier.connectors.vllm.shared.contract import FILES as SHARED_FILES
from kvtier.connectors.vllm.shared.contract import with_shared

OLDEST, NEWEST = "0.18", "0.33"
"""Oldest and newest version whose sources fulfil the contract."""
RUN_WITH = ("0.18", "0.20", "0.23", "0.25", "0.27")
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
        "get_transfer_results": Takes("finished_req_ids"),
    },
    "SupportsHMA": {"request_finished_all_groups": Takes("request, block_ids")},
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
    "MultiConnector": {"__init__": Takes("vllm_config, role, kv_cache_config")},
    "Scheduler": {
        "has_finished_requests": Takes(),
        "_update_from_kv_xfer_finished": Takes("kv_connector_output"),
    },
}
"""vLLM calls these, and kvtier has its own: what vLLM may pass must be known."""

CALLED: Mapping[str, Mapping[str, Takes]] = {
    **SHARED_CALLED,
    "KVConnectorBase_V1": {"_get_connector_metadata": Takes()},
    "KVCacheBlocks": {"get_block_ids": Takes()},
    "KVConnectorFactory": {"register_connector": Takes("name, module_path, class_name")},
}
"""kvtier calls these: they must take what it passes, and want nothing more."""

BUILT: Mapping[str, tuple[str, ...]] = {
    "KVConnectorStats": ("data",),
}
"""kvtier makes these from the fields named, in this order."""

READ = with_shared({
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "KVConnectorPromMetrics": (
        "_counter_cls", "_gauge_cls", "_histogram_cls", "per_engine_labelvalues",
    ),
    "KVConnectorFactory": ("_registry",),
    "MultiConnector": ("_connectors", "_ktc_kv_transfer_config"),
    "Scheduler": ("connector", "failed_recving_kv_req_ids", "requests"),
    "KVConnectorRole": ("SCHEDULER", "WORKER"),
    "KVConnectorMetadata": (),
    "NewRequestData": ("block_ids",),
    "KVCacheConfig": ("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    "KVCacheTensor": ("size",),
    "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "FullAttentionSpec": ("block_size", "page_size_bytes", "real_page_size_bytes"),
    "MLAAttentionSpec": ("block_size", "page_size_bytes", "real_page_size_bytes"),
    "SlidingWindowSpec": ("sliding_window",),
    "ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "MambaSpec": ("dtypes", "shapes"),
    "VllmConfig": ("kv_events_config",),
    "CacheConfig": ("block_size", "cache_dtype", "prefix_caching_hash_algo",),
    "ParallelConfig": (
        "world_size", "pipeline_parallel_size", "data_parallel_rank",
        "distributed_executor_backend", "nnodes_within_dp",
    ),
    "Request": (
        "kv_transfer_params", "num_tokens", "skip_reading_prefix_cache", "all_token_ids",
        "lora_request",
    ),
    "ModelConfig": ("dtype",),
})  # fmt: skip
"""kvtier reads these fields, attributes and members."""

OPTIONAL = frozenset(
    {
        "KVConnectorBase_V1.on_new_request",
        "KVConnectorBase_V1.has_pending_push_work",
        "KVConnectorBase_V1.get_transfer_results",
    }
)
"""Not in every version: vLLM reports new requests from 0.23 on, checks from 0.25 on whether a
connector has work, and has ranks report failed loads by request from 0.30 on."""

FILES = (
    "distributed/kv_events.py",
    f"{CONNECTOR}/base.py",
    f"{CONNECTOR}/metrics.py",
    f"{CONNECTOR}/multi_connector.py",
    "distributed/kv_transfer/kv_connector/factory.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/sched/scheduler.py",
    "v1/kv_cache_interface.py",
    *SHARED_FILES,
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

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable by which vLLM 0.18 uses its model runner V2."""


def refused_runner(folder: Path) -> str:
    """Return why kvtier can't serve the model runner that the environment selects; "" if it can.

    The model runner V2 of vLLM 0.18 drops what a connector in a rank reports to the scheduler.

    folder: of the package ``vllm``.
    """
    if os.environ.get(RUNNER, "") in ("", "0"):
        return ""
    runner = folder / "v1/worker/gpu/kv_connector.py"
    if not runner.is_file() or "build_connector_worker_meta" in runner.read_text():
        return ""
    return f"its model runner V2 drops the reports of a connector's ranks: unset {RUNNER}"
