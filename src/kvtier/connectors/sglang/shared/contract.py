"""The parts of SGLang that kvtier relies on, as data (see ``common/contract.py``).

version     what is new in it, for kvtier
0.5.14      today's calls of the storage back end
0.5.16      host pools have modules of their own; the context of a process has SGLang's options
0.5.23      SGLang notifies a back end when all host pools are known; it reports whole prompts;
            the positions where a prompt may be cut are a list, which ranks intersect; pools
            beside the KV may be groups of blocks, which are not served
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvtier.connectors.common.contract import Contract, Takes

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
    "Req": {"finished": Takes()},
}
BUILT: Mapping[str, tuple[str, ...]] = {
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages"),
    "StorageMetrics": (),
}
READ: Mapping[str, tuple[str, ...]] = {
    "HiCacheStorageConfig": (
        "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
        "is_mla_model", "model_name", "extra_config", "tp_lcm_size", "should_split_heads",
    ),
    "HiCacheStorageExtraInfo": ("prefix_keys",),
    "ModelConfig": (
        "from_server_args", "get_total_num_kv_heads", "is_audio_model", "is_multimodal",
    ),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
    "HostKVCache": ("page_size", "page_num", "layout", "dtype", "get_dummy_flat_data_page"),
    "MHATokenToKVPoolHost": (
        "get_page_buffer_meta", "backup_from_device_all_layer", "load_to_device_per_layer",
        "_buffer_infos", "head_num", "layer_num",
    ),
    "MLATokenToKVPoolHost": (
        "get_page_buffer_meta", "backup_from_device_all_layer", "load_to_device_per_layer",
    ),
    "RuntimeContext": ("server_args",),
    "SchedulerWeightUpdaterManager": (
        "update_weights_from_disk", "update_weights_from_distributed",
        "update_weights_from_tensor", "update_weights_from_ipc", "release_memory_occupation",
    ),
    "Scheduler": ("run_batch", "process_batch_result", "flush_cache"),
    "StorageMetrics": (
        "prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth",
    ),
    "ScheduleBatch": ("forward_mode", "prefix_lens", "extend_lens", "reqs"),
    "Req": ("extra_key", "input_embeds", "origin_input_ids", "output_ids", "rid"),
    "HookType": ("AROUND", "REPLACE"),
}  # fmt: skip

OPTIONS = (
    "--attention-backend", "--device", "--disable-cuda-graph", "--disable-overlap-schedule",
    "--dtype", "--enable-cache-report", "--enable-hierarchical-cache",
    "--enable-unified-cache-external-linker", "--grammar-backend", "--hicache-ratio",
    "--hicache-storage-backend", "--hicache-storage-backend-extra-config", "--host",
    "--max-total-tokens", "--mem-fraction-static", "--model-path", "--page-size", "--port",
    "--sampling-backend", "--unified-cache-external-linker-backend",
    "--unified-cache-external-linker-config",
)  # fmt: skip
"""SGLang options that kvtier's guides and commands mention."""

NEWEST = partial(Contract, "SGLang", "sglang", "0.5.23", "0.5.23", ("0.5.23",))
"""Contracts of what needs SGLang 0.5.23."""

STORAGE = Contract(
    "SGLang",
    "sglang",
    "0.5.14",
    "0.5.23",
    ("0.5.16", "0.5.23"),
    (
        "srt/configs/model_config.py",
        f"{CACHE}/hicache_storage.py",
        f"{CACHE}/memory_pool_host.py",
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
    optional=frozenset({"RuntimeContext.server_args", "MHATokenToKVPoolHost._buffer_infos"}),
    options=OPTIONS,
)
"""Contract of the storage back end."""

LINKER = NEWEST(
    (
        "srt/configs/model_config.py",
        f"{CACHE}/base_prefix_cache.py",
        f"{CACHE}/cache_init_params.py",
        f"{CACHE}/hicache_storage.py",
        f"{CACHE}/hybrid_cache/linker_pool_assembler.py",
        f"{CACHE}/memory_pool.py",
        f"{CACHE}/swa_memory_pool.py",
        f"{CACHE}/unified_cache/unified_cache_linker.py",
        f"{CACHE}/unified_cache/unified_tree_core_interface.py",
        f"{CACHE}/unified_radix_cache.py",
        "srt/managers/schedule_batch.py",
        "srt/managers/scheduler.py",
        "srt/managers/scheduler_components/weight_updater.py",
        "srt/plugins/hook_registry.py",
    ),
    overridden={
        "UnifiedCacheLinker": {
            "lookup": Takes("rid, transfers"),
            "load": Takes("rid, transfers"),
            "start_layer_wise_loading": Takes(),
            "finish_layer_wise_loading": Takes("counter_index"),
            "cancel_queued_load": Takes("rid"),
            "offload": Takes("transfers, session_id="),
            "num_completed_offloads": Takes(),
            "pop_completed_offload": Takes(),
            "reset": Takes(),
            "close": Takes(),
        },
        "Scheduler": {"get_new_batch_prefill": Takes("running_batch")},
        "UnifiedCacheLinkerWrapper": {
            "match": Takes("key, req, result"),
            "_offload_node": Takes("node_id, transfers"),
        },
    },
    called={
        "HookRegistry": CALLED["HookRegistry"],
        "Req": {**CALLED["Req"], "init_next_round_input": Takes("tree_cache, cow_mamba")},
        "UnifiedRadixCache": {
            "_all_reduce_attn_groups": Takes("tensor, op"),
            "get_prefix_hash_values": Takes("node_id"),
        },
        "UnifiedTreeCoreInterface": {
            "get_hash_values": Takes("node_id"),
            "snapshot_buffer_backup": Takes("node_id, pass_prefix_keys"),
        },
    },
    read={
        "CacheInitParams": (
            "attn_cp_rank", "attn_cp_size", "attn_tp_cache_group", "mtp_draft_device_pools",
            "page_size", "pp_rank", "pp_size", "req_to_token_pool", "sidecar_draft_device_pools",
            "token_to_kv_pool_allocator", "tp_cache_group",
        ),
        "DevicePoolEntry": (
            "buffer_meta", "components", "device_pool", "indices_from_pool", "layer_mapping",
            "name", "page_size",
        ),
        "DevicePoolGroup": ("entries", "num_layers"),
        "MHATokenToKVPool": (
            "head_num", "k_buffer", "k_scale_buffer", "kv_cache_layout", "use_hnd", "v_buffer",
        ),
        "MLATokenToKVPool": ("kv_buffer",),
        "BufferBackupSnapshot": ("parent_last_hash",),
        "MatchResult": ("device_prefix_len", "last_device_node"),
        "PoolTransfer": ("name", "device_indices", "keys", "hit_policy"),
        "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
        "PoolName": ("KV", "SWA", "MAMBA"),
        "ModelConfig": READ["ModelConfig"],
        "Req": (*READ["Req"], "cache_salt", "kv_hints"),
        "ScheduleBatch": READ["ScheduleBatch"],
        "SWAKVPool": ("full_kv_pool", "layers_mapping", "start_layer", "swa_kv_pool"),
        "Scheduler": (
            "process_batch_result", "run_batch", "tree_cache", "waiting_queue",
        ),
        "SchedulerWeightUpdaterManager": READ["SchedulerWeightUpdaterManager"],
        "UnifiedCacheLinkerWrapper": ("cache", "cache_linker"),
        "UnifiedRadixCache": ("linker", "tree_core"),
    },
)  # fmt: skip
"""Contract of the linker."""

TELLING = NEWEST(
    (
        f"{CACHE}/base_prefix_cache.py",
        f"{CACHE}/radix_cache.py",
        f"{CACHE}/unified_cache/unified_tree_core_interface.py",
        f"{CACHE}/unified_radix_cache.py",
    ),
    overridden={
        "UnifiedRadixCache": {
            "prefetch_from_storage": Takes(
                "request, last_host_node_id, new_input_tokens, last_hash=, prefix_keys=, "
                "matched_prefix_tokens=, extra_key=, cache_salt=, storage_hit_end="
            ),
        },
    },
    called={
        "RadixKey": {"page_aligned": Takes("page_size")},
        "UnifiedRadixCache": {"get_prefix_hash_values": Takes("node_id")},
        "UnifiedTreeCoreInterface": {"get_hash_values": Takes("node_id")},
    },
    read={
        "CacheRequestHandle": ("attempt_id", "rid"),
        "UnifiedRadixCache": ("page_size", "tree_core"),
    },
)
"""Contract of the hooks that report whole prompts to the storage back end's policy."""

EVENTS = NEWEST(
    ("srt/disaggregation/kv_events.py", f"{CACHE}/unified_radix_cache.py"),
    overridden={"UnifiedRadixCache": {"take_events": Takes()}},
    built={
        "BlockStored": (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
            "cache_salt",
        ),
        "BlockRemoved": ("block_hashes", "medium"),
    },
    read={"BlockStored": ("lora_name",), "AllBlocksCleared": ()},
)  # fmt: skip
"""Contract of the events of kvtier's tiers."""

COPIES = Contract(
    "SGLang",
    "sglang",
    "0.5.23",
    "0.5.23",
    (),
    (
        f"{CACHE}/device_pool_info.py",
        f"{CACHE}/l2_transfer.py",
        f"{CACHE}/pool_host/base.py",
        f"{CACHE}/pool_host/mha.py",
        f"{CACHE}/pool_host/mla.py",
        "srt/plugins/hook_registry.py",
    ),
    overridden={
        "L2TransferEngine": {"__init__": Takes("io_backend")},
        **{
            name: {
                "load_to_device_per_layer": Takes(
                    "device_pool, host_indices, device_indices, layer_id, io_backend, is_draft="
                ),
                "backup_from_device_all_layer": Takes(
                    "device_pool, host_indices, device_indices, io_backend"
                ),
            }
            for name in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
        },
    },
    called={
        "HookRegistry": CALLED["HookRegistry"],
        "MHATokenToKVPoolHost": {"_npu_transfer_buffers": Takes()},
        "MLATokenToKVPoolHost": {"_npu_transfer_pool_slices": Takes()},
    },
    read={
        "HostKVCache": ("dcp_size", "layout", "page_size"),
        "HookType": ("AROUND",),
        "MHATokenToKVPoolHost": ("_transfer_device", "target_layer_num"),
        "MLATokenToKVPoolHost": (
            "_is_dummy", "_layer_shard_enabled", "_transfer_device", "target_layer_num",
        ),
        "MLASplitBuffers": ("index_k", "index_layer_indices", "index_scales", "k", "v"),
    },
)  # fmt: skip
"""Contract of the copies on Ascend, which have not run on an NPU yet."""
