"""The parts of vLLM that kvtier relies on, as data, and how the installed vLLM differs.

vLLM calls its offloading interface experimental: between versions, methods are moved, extended or
removed. The data below is compared with the installed vLLM (``common/contract.py``).

    version     what is new in it, for kvtier
    0.27.1      today's worker, look-up results and config
    0.29        a step reports to the connector the loads that it waits for
    0.30        stores are queued when a step's saving ends, no longer when results are collected;
                a rank's results list requests whose load failed separately
    0.31        a key has a position in its request; vLLM no longer calls ``touch``, so a manager
                has to remember itself what a request used
    0.32        the manager reports which tier a hit came from, and vLLM counts it
    0.33        loads within a step, which the worker must hurry with (``expedited``); a manager may
                have a lock
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connectors.common.contract import Contract, Takes
from kvtier.connectors.vllm.shared.contract import CALLED as SHARED_CALLED
from kvtier.connectors.vllm.shared.contract import FILES as SHARED_FILES
from kvtier.connectors.vllm.shared.contract import with_shared

OLDEST, NEWEST = "0.30", "0.33"
"""Oldest and newest version whose sources fulfil the contract."""
RUN_WITH = ("0.30", "0.31", "0.32")
"""Versions that the tests were run under."""


CONNECTOR = "distributed/kv_transfer/kv_connector"
OFFLOAD = "v1/kv_offload"

OVERRIDDEN: Mapping[str, Mapping[str, Takes]] = {
    "OffloadingManager": {
        "lookup": Takes("key, req_context"),
        "get_load_source": Takes("key, req_context"),
        "prepare_load": Takes("keys, req_context"),
        "touch": Takes("keys, req_context"),
        "complete_load": Takes("keys, req_context"),
        "prepare_store": Takes("keys, req_context"),
        "complete_store": Takes("keys, req_context, success="),
        "on_new_request": Takes("req_context"),
        "on_request_finished": Takes("req_context"),
        "take_events": Takes(),
        "on_schedule_end": Takes("context"),
        "has_pending_work": Takes(),
        "reset_cache": Takes(),
        "get_stats": Takes(),
        "shutdown": Takes(),
    },
    "OffloadingWorker": {
        "submit_store": Takes("job_id, src_spec, dst_spec"),
        "submit_load": Takes("job_id, src_spec, dst_spec, expedited="),
        "get_finished": Takes(),
        "wait": Takes("job_ids"),
        "shutdown": Takes(),
    },
    "OffloadingSpec": {
        "__init__": Takes("config"),
        "get_manager": Takes(),
        "get_worker": Takes("kv_caches"),
        "build_metric_definitions": Takes("extra_config"),
    },
    "OffloadingConnector": {
        "__init__": Takes("vllm_config, role, kv_cache_config"),
        "on_new_request": Takes("request"),
        "get_num_new_matched_tokens": Takes("request, num_computed_tokens"),
        "update_state_after_alloc": Takes("request, blocks, num_external_tokens"),
        "build_connector_meta": Takes("scheduler_output"),
        "update_connector_output": Takes("connector_output"),
        "register_kv_caches": Takes("kv_caches"),
        "handle_preemptions": Takes("kv_connector_metadata"),
        "start_load_kv": Takes("forward_context, **"),
        "wait_for_save": Takes(),
        "get_transfer_results": Takes("finished_req_ids"),
        "build_connector_worker_meta": Takes(),
        "request_finished": Takes("request, block_ids"),
        "request_finished_all_groups": Takes("request, block_ids"),
        "get_kv_connector_stats": Takes(),
        "take_events": Takes(),
        "reset_cache": Takes(),
        "shutdown": Takes(),
    },
    "MultiConnector": {
        "__init__": Takes("vllm_config, role, kv_cache_config"),
        "build_prom_metrics": Takes(
            "vllm_config, metric_types, labelnames, per_engine_labelvalues"
        ),
    },
    "OffloadingWorkerMetadata": {"aggregate": Takes("other")},
}
"""vLLM calls these, and kvtier has its own: what vLLM may pass must be known."""

CALLED: Mapping[str, Mapping[str, Takes]] = {
    **SHARED_CALLED,
    "OffloadingSpecFactory": {
        "register_spec": Takes("name, module_path, class_name"),
        "get_spec_cls": Takes("extra_config"),
    },
    "KVConnectorFactory": {"register_connector": Takes("name, module_path, class_name")},
    "OffloadingConnectorWorker": {"_init_worker": Takes("kv_caches")},
    "OffloadingConnectorStats": {
        "increase_counter": Takes("counter_name, counter_increase_value, labelvalues"),
        "set_gauge": Takes("gauge_name, gauge_value, labelvalues"),
        "observe_histogram": Takes("histogram_name, histogram_value, labelvalues"),
    },
    "MultiConnector": {"_get_connector_classes_and_configs": Takes("vllm_config")},
    "OffloadPromMetrics": {"_create_metric": Takes("metric_name, metadata")},
    "ReqContext": {"get_offload_key_position": Takes("key")},
    "TierFilter": {"allows": Takes("medium, locality")},
}
"""kvtier calls these: they must take what it passes, and want nothing more."""

BUILT: Mapping[str, tuple[str, ...]] = {
    "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
    "OffloadingEvent": ("keys", "medium", "removed", "locality"),
    "OffloadingMetricMetadata": ("documentation", "labelnames"),
    "OffloadingHistogramMetadata": ("documentation", "labelnames", "buckets"),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    "RequestOffloadingContext": (),
    "OffloadingConnectorMetadata": ("load_jobs", "store_jobs"),
    "KVConnectorTransferResults": (),
    "CanonicalKVCacheTensor": ("tensor", "page_size_bytes"),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
}
"""kvtier makes these from the fields named, in this order."""

READ = with_shared({
    "OffloadingConfig": (
        "groups", "worker_kv_bytes_per_block", "extra_config", "model", "cache", "parallel",
        "kv_cache_layout", "replicated_layout", "canonical_layout",
    ),
    "OffloadingParallelConfig": (
        "rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size",
    ),
    "OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "OffloadingGroupConfig": ("tokens_per_block", "layer_names", "group_id"),
    "OffloadingModelConfig": ("name", "dtype"),
    "OffloadingSpec": ("config", "tokens_per_block", "blocks_per_chunk", "kv_events_config"),
    "OffloadingKVEventsConfig": ("enable_kv_cache_events",),
    "OffloadingConnector": (
        "scheduler", "connector_scheduler", "connector_worker", "_connector_metadata",
    ),
    "OffloadingConnectorScheduler": (
        "config", "manager", "_jobs", "_req_status", "_make_boundary_key",
    ),
    "TransferJobStatus": ("req_id", "is_store"),
    "RequestOffloadState": ("config", "group_states", "req_context", "update_offload_keys"),
    "RequestGroupState": ("offload_keys",),
    "SchedulerOffloadConfig": ("kv_group_configs", "tokens_per_hash"),
    "GroupOffloadConfig": ("group_idx", "tokens_per_chunk"),
    "OffloadingConnectorWorker": ("worker", "spec", "kv_cache_config"),
    "KVConnectorFactory": ("_registry",),
    "MultiConnector": ("_ktc_kv_transfer_config",),
    "MultiKVConnectorPromMetrics": ("_prom_metrics",),
    "OffloadPromMetrics": ("_offloading_metric_metadata", "_offloading_metric_defs"),
    "KVConnectorTransferResults": ("failed_recving",),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
    "CanonicalKVCacheTensor": ("tensor",),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "GPULoadStoreSpec": ("block_ids", "group_sizes", "block_indices"),
    "OffloadingConnectorMetadata": ("load_jobs", "store_jobs", "jobs_to_flush"),
    "OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats"),
    "TransferJob": ("req_id",),
    "SchedulerOutput": ("finished_req_ids",),
    "ReqContext": ("req_id", "kv_transfer_params", "_offload_key_positions"),
    "LookupResult": ("MISS", "HIT", "HIT_PENDING", "RETRY"),
    "Medium": ("CPU", "STORAGE"),
    "Locality": ("LOCAL", "REMOTE"),
    "CacheHitSource": ("HOST", "DISK", "EXTERNAL_UNSPECIFIED"),
    "VllmConfig": ("max_concurrent_batches",),
    "ParallelConfig": ("data_parallel_index",),
    "ModelConfig": ("enable_prompt_embeds",),
})  # fmt: skip
"""kvtier reads these fields, attributes and members."""

OPTIONAL = frozenset(
    {
        "CacheHitSource",
        "OffloadingManager.get_load_source",
        "ReqContext.get_offload_key_position",
        "ReqContext._offload_key_positions",
    }
)
"""Not in every version: before 0.32 vLLM does not query where a hit came from; before 0.31 kvtier
itself notes the position of a key in its request (``offloading/positions.py``)."""

FILES = (
    f"{OFFLOAD}/base.py",
    f"{OFFLOAD}/config.py",
    f"{OFFLOAD}/factory.py",
    f"{CONNECTOR}/factory.py",
    f"{CONNECTOR}/v1/base.py",
    f"{CONNECTOR}/v1/multi_connector.py",
    f"{CONNECTOR}/v1/offloading_connector.py",
    f"{CONNECTOR}/v1/offloading/common.py",
    f"{CONNECTOR}/v1/offloading/metrics.py",
    f"{CONNECTOR}/v1/offloading/scheduler.py",
    f"{CONNECTOR}/v1/offloading/worker.py",
    "v1/metrics/cache_hit_source.py",
    *SHARED_FILES,
)
"""Files of vLLM that define the classes above."""

OPTIONS = ("--kv-transfer-config", "--block-size", "--no-enable-prefix-caching")
"""vLLM options that kvtier's guides and commands mention."""

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
    options=OPTIONS,
)
