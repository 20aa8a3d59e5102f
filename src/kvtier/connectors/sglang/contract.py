"""What kvtier relies on in SGLang, as data (see ``shared/contract.py``).

version     what is new in it, for kvtier
0.5.18      the storage back end's calls of today
0.5.23      a back end is told that all host pools are known; where a prompt may be cut is a list,
            that ranks intersect; pools beside the KV may come as groups of blocks, which are
            not served
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connectors.shared.contract import Contract, Takes

CACHE = "srt/mem_cache"

OVERRIDDEN: Mapping[str, Mapping[str, Takes]] = {
    "HiCacheStorage": {
        "register_mem_pool_host": Takes("mem_pool_host"),
        "register_mem_host_pool_v2": Takes("host_pool, host_pool_name"),
        "batch_exists": Takes("keys, extra_info="),
        "batch_exists_v2": Takes("keys, pool_transfers=, extra_info="),
        "batch_get_v1": Takes("keys, host_indices, extra_info="),
        "batch_get_v2": Takes("transfers, extra_info="),
        "batch_set_v1": Takes("keys, host_indices, extra_info="),
        "batch_set_v2": Takes("transfers, extra_info="),
        "get": Takes("key, target_location=, target_sizes="),
        "batch_get": Takes("keys, target_locations=, target_sizes="),
        "set": Takes("key, value=, target_location=, target_sizes="),
        "batch_set": Takes("keys, values=, target_locations=, target_sizes="),
        "exists": Takes("key"),
        "clear": Takes(),
        "get_stats": Takes(),
    },
}
CALLED: Mapping[str, Mapping[str, Takes]] = {
    "PoolTransferResult": {"empty": Takes()},
    "HookRegistry": {"register": Takes("target, hook, hook_type")},
}
BUILT: Mapping[str, tuple[str, ...]] = {
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages"),
    "StorageMetrics": (
        "prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth",
    ),
}  # fmt: skip
READ: Mapping[str, tuple[str, ...]] = {
    "HiCacheStorageConfig": (
        "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
        "is_mla_model", "model_name", "extra_config", "tp_lcm_size", "should_split_heads",
    ),
    "HiCacheStorageExtraInfo": ("prefix_keys",),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
    "HostKVCache": ("page_size", "page_num", "layout", "dtype", "get_dummy_flat_data_page"),
    "MHATokenToKVPoolHost": (
        "get_page_buffer_meta", "backup_from_device_all_layer", "load_to_device_per_layer",
    ),
    "MLATokenToKVPoolHost": (
        "get_page_buffer_meta", "backup_from_device_all_layer", "load_to_device_per_layer",
    ),
    "RuntimeContext": ("server_args",),
    "SchedulerWeightUpdaterManager": (
        "update_weights_from_disk", "update_weights_from_distributed",
        "update_weights_from_tensor", "update_weights_from_ipc",
    ),
    "Scheduler": ("run_batch", "process_batch_result"),
    "ScheduleBatch": ("forward_mode", "prefix_lens", "extend_lens"),
    "HookType": ("AROUND", "REPLACE"),
}  # fmt: skip

STORAGE = Contract(
    "SGLang",
    "sglang",
    "0.5.18",
    "0.5.23",
    ("0.5.23",),
    (
        f"{CACHE}/hicache_storage.py",
        f"{CACHE}/pool_host/base.py",
        f"{CACHE}/pool_host/mha.py",
        f"{CACHE}/pool_host/mla.py",
        "srt/managers/schedule_batch.py",
        "srt/managers/scheduler.py",
        "srt/managers/scheduler_components/weight_updater.py",
        "srt/observability/metrics_collector.py",
        "srt/plugins/hook_registry.py",
        "srt/runtime_context.py",
    ),
    overridden=OVERRIDDEN,
    called=CALLED,
    built=BUILT,
    read=READ,
)
"""Of the storage back end."""
