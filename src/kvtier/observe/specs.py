"""Declaration of every metric: its name, type, meaning and labels, once.

What exports, reads or documents a metric takes its name from here. Only the dashboard and the
alerts, which Grafana and Prometheus read, spell names themselves; a test compares them.

A name ends with its unit, which is a base unit, and a counter's with ``_total``. A constant is
called like its metric, without ``kvtier_`` and ``_total``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
REQUEST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
AGES_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 100000.0)

PREFIX = "kvtier_"
VLLM_PREFIX = "vllm:"
"""Prefix by which vLLM removes the metrics of an engine that has gone."""

OverProcesses = Literal["livesum", "livemax"]


@dataclass(frozen=True, slots=True, eq=False)
class MetricSpec:
    """Name, type, meaning and labels of one metric.

    name: name in Prometheus; of a histogram, without ``_bucket``, ``_sum`` and ``_count``.
    buckets: upper bounds of a histogram's buckets.
    over_processes: how prometheus_client merges a gauge of several processes of a server.
    counted_as: the cache's metric of the same number; None unless an engine exports the number in
        metrics of its own.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    over_processes: OverProcesses = "livesum"
    counted_as: MetricSpec | None = None

    @property
    def registered_name(self) -> str:
        """Name that vLLM registers. Prometheus' client appends ``_total`` to a counter's."""
        return self.name.removesuffix("_total")


DECLARED: dict[str, MetricSpec] = {}
"""All metrics by name."""


def _declare(spec: MetricSpec) -> MetricSpec:
    assert spec.name not in DECLARED, f"{spec.name} is declared twice"
    DECLARED[spec.name] = spec
    return spec


def _counter(
    name: str, meaning: str, *labels: str, counted_as: MetricSpec | None = None
) -> MetricSpec:
    return _declare(MetricSpec(name, "counter", meaning, labels, counted_as=counted_as))


def _gauge(
    name: str,
    meaning: str,
    *labels: str,
    over_processes: OverProcesses = "livesum",
    counted_as: MetricSpec | None = None,
) -> MetricSpec:
    return _declare(
        MetricSpec(
            name, "gauge", meaning, labels, over_processes=over_processes, counted_as=counted_as
        )
    )


def _histogram(
    name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS
) -> MetricSpec:
    return _declare(MetricSpec(name, "histogram", meaning, labels, buckets))


def _named(prefix: str) -> tuple[MetricSpec, ...]:
    return tuple(spec for name, spec in DECLARED.items() if name.startswith(prefix))


_RECORDED = "Requests written to the recording, or dropped since its queue was full."
_HINTS = "Actions in orchestrators' kv_hints, by type; unknown and invalid ones were ignored."

# The cache, under every engine.

REQUESTS = _counter("kvtier_requests_total", "Requests that ended.")
PROMPT_BLOCKS = _counter("kvtier_prompt_blocks_total", "Full blocks of prompts.")
HIT_BLOCKS = _counter(
    "kvtier_hit_blocks_total",
    "Prompt blocks served from the cache, by the tier that held them.",
    "tier",
)
HINTS = _counter(
    "kvtier_hints_total",
    "Actions of clients' hints, by result. A scheduled prefetch counts again when it "
    "begins, and when it was used or has expired.",
    "action",
    "outcome",
)
COPIED_BYTES = _counter("kvtier_copied_bytes_total", "Bytes copied between tiers.", "src", "dst")
COPY_SECONDS = _histogram("kvtier_copy_seconds", "Duration of one copy job.", "src", "dst")
FAILED_COPIES = _counter("kvtier_failed_copies_total", "Copy jobs that failed.", "src", "dst")
FAILED_BLOCKS = _counter(
    "kvtier_failed_blocks_total",
    "Blocks whose copy failed or whose content was damaged.",
    "src",
    "dst",
)
LATE_LOADS = _counter("kvtier_late_loads_total", "Loads abandoned at their deadline.")
LOAD_SECONDS = _histogram("kvtier_load_seconds", "Time a request waited for its load.")
LOOKUP_SECONDS = _histogram(
    "kvtier_lookup_seconds", "Time of one look-up of a prompt's next blocks in a store.", "tier"
)
EVICTED_BLOCKS = _counter("kvtier_evicted_blocks_total", "Blocks evicted from a tier.", "tier")
REFUSED_BLOCKS = _counter(
    "kvtier_refused_blocks_total",
    "Blocks not stored: every slot of the tier was held or in flight.",
    "tier",
)
UNADMITTED_BLOCKS = _counter(
    "kvtier_unadmitted_blocks_total",
    "Blocks that the eviction policy did not admit to a full tier.",
    "tier",
)
UNWRITTEN_BLOCKS = _counter(
    "kvtier_unwritten_blocks_total",
    "Admitted blocks not written: evicted from memory first, or over the write budget.",
    "tier",
)
SCRUBBED_BYTES = _counter(
    "kvtier_scrubbed_bytes_total", "Bytes verified in the background.", "tier"
)
WARMED_BLOCKS = _counter(
    "kvtier_warmed_blocks_total", "Blocks copied into a tier by a warm start.", "tier"
)
WARMED_BYTES = _counter(
    "kvtier_warmed_bytes_total", "Bytes copied into a tier by a warm start.", "tier"
)
DAMAGED_BLOCKS = _counter(
    "kvtier_damaged_blocks_total",
    "Blocks read from storage whose checksum or record did not match.",
    "tier",
)
AUDITS = _counter(
    "kvtier_audits_total",
    "Audited hits, by the tier that held them: recomputed KV was equal, within_tolerance or "
    "different; or the audit was skipped, for lack of an idle moment or of room.",
    "tier",
    "outcome",
)
USED_SLOTS = _gauge("kvtier_used_slots", "Slots in use.", "tier")
SLOTS = _gauge("kvtier_slots", "Slots of a tier.", "tier")
SLOT_BYTES = _gauge(
    "kvtier_slot_bytes",
    "Bytes of one slot, summed over the ranks that hold a part of its block.",
    "tier",
    over_processes="livemax",
)
PLANNED_BLOCKS = _counter(
    "kvtier_planned_blocks_total",
    "Cached blocks below the device, by the planner's decision: load or recompute.",
    "decision",
)
PROBED_BLOCKS = _counter(
    "kvtier_probed_blocks_total",
    "Blocks that are computed, and read besides to measure how long their tier takes now.",
    "src",
)
PREDICTED_LOAD_SECONDS = _counter(
    "kvtier_predicted_load_seconds_total",
    "Predicted time of copies towards the device, without queueing.",
    "src",
)
ACTUAL_LOAD_SECONDS = _counter(
    "kvtier_actual_load_seconds_total", "Actual time of the same copies.", "src"
)
LOAD_ERROR_RATIO = _histogram(
    "kvtier_load_error_ratio",
    "Actual time of such a copy divided by its predicted time.",
    "src",
    buckets=RATIOS,
)
PREDICTED_PREFILL_SECONDS = _counter(
    "kvtier_predicted_prefill_seconds_total", "Predicted time of prefills."
)
ACTUAL_PREFILL_SECONDS = _counter(
    "kvtier_actual_prefill_seconds_total", "Actual time of the same prefills."
)
SAVED_TOKENS = _counter("kvtier_saved_tokens_total", "Prompt tokens served from the cache.")
SAVED_SECONDS = _counter(
    "kvtier_saved_seconds_total",
    "Prefill time of these tokens, less the time that requests waited for loads.",
)
RETURNED_BLOCKS = _counter(
    "kvtier_returned_blocks_total",
    "Evicted blocks that were requested again, estimated from a sample.",
    "tier",
)
RETURN_SECONDS = _histogram(
    "kvtier_return_seconds",
    "Time from a sampled block's eviction to its first later request.",
    "tier",
    buckets=AGES_S,
)
BREAKER_STATE = _gauge(
    "kvtier_breaker_state",
    "State of a storage tier: 0 in use, 1 being retried, 2 paused after errors, 3 its slab was "
    "cut short.",
    "tier",
    over_processes="livemax",
)
TRANSFERS_IN_FLIGHT = _gauge(
    "kvtier_transfers_in_flight", "Copies that have begun and not ended.", "src", "dst"
)
QUEUED_SECONDS = _gauge(
    "kvtier_queued_seconds",
    "Predicted wait of a copy that is queued now; infinite while the tier takes none.",
    "src",
    "dst",
    over_processes="livemax",
)
CACHE = tuple(DECLARED.values())

# ``kvtier serve``, about its HTTP clients.

SERVER_REQUESTS = _counter(
    "kvtier_server_requests_total",
    "HTTP requests; status 499 is a client that left before its answer was complete.",
    "endpoint",
    "status",
)
SERVER_CLOSED_CONNECTIONS = _counter(
    "kvtier_server_closed_connections_total",
    "Connections that the server closed: no complete header in time (header_timeout), an answer "
    "left unread (write_timeout), too many connections (room), not HTTP (invalid_http), not TLS "
    "on a TLS port (tls).",
    "reason",
)
SERVER_TTFT_SECONDS = _histogram(
    "kvtier_server_ttft_seconds",
    "Time from the arrival of a request to its first token.",
    "endpoint",
    buckets=REQUEST_SECONDS,
)
SERVER_E2E_SECONDS = _histogram(
    "kvtier_server_e2e_seconds",
    "Time from the arrival of a request to the end of its complete answer.",
    "endpoint",
    buckets=REQUEST_SECONDS,
)
SERVER_PROMPT_TOKENS = _counter("kvtier_server_prompt_tokens_total", "Prompt tokens.")
SERVER_CACHED_TOKENS = _counter(
    "kvtier_server_cached_tokens_total", "Prompt tokens served from the cache."
)
SERVER_COMPLETION_TOKENS = _counter("kvtier_server_completion_tokens_total", "Generated tokens.")
SERVER_HINT_ACTIONS = _counter("kvtier_server_hint_actions_total", _HINTS, "action")
SERVER_RECORDED_REQUESTS = _counter("kvtier_server_recorded_requests_total", _RECORDED, "outcome")
SERVER_INFO = _gauge(
    "kvtier_server_info",
    "1; the labels name the served model and kvtier's version.",
    "model_name",
    "version",
)
SERVER_UPTIME_SECONDS = _gauge("kvtier_server_uptime_seconds", "Time since the server started.")
SERVER_RUNNING = _gauge("kvtier_server_running", "Running requests.")
SERVER_WAITING = _gauge("kvtier_server_waiting", "Waiting requests.")
SERVER = _named(f"{PREFIX}server_")

# ``kvtier node``, about itself, its engines and its tenants. The caches of its rooms have the
# metrics of ``CACHE``, with the labels tenant and room.

NODE_INFO = _gauge("kvtier_node_info", "1; the label names kvtier's version.", "version")
NODE_UPTIME_SECONDS = _gauge("kvtier_node_uptime_seconds", "Time since the node started.")
NODE_ENGINES = _gauge("kvtier_node_engines", "Attached engines.", "tenant")
NODE_ENGINE_PROCESSES = _gauge(
    "kvtier_node_engine_processes", "Processes of an attached engine.", "tenant", "engine"
)
NODE_ENGINE_INFO = _gauge(
    "kvtier_node_engine_info",
    "1; the title is the name of an attached engine with its model and port, as far as known.",
    "tenant",
    "engine",
    "title",
)
NODE_ENGINE_SLOTS = _gauge(
    "kvtier_node_engine_slots", "Slots that an engine reads or writes.", "tenant", "engine"
)
NODE_WAITING_REQUESTS = _gauge(
    "kvtier_node_waiting_requests",
    "Requests of an engine that wait for storage or for another engine.",
    "tenant",
    "engine",
)
NODE_ENGINE_FAILURES = _counter(
    "kvtier_node_engine_failures_total",
    "Calls of an engine that the node did not answer in time, as the engine reports them later.",
    "tenant",
    "engine",
)
NODE_ENGINE_PAUSES = _counter(
    "kvtier_node_engine_pauses_total",
    "Times that an engine's breaker opened after several such calls: it computed for a while.",
    "tenant",
    "engine",
)
NODE_LOOKUP_SECONDS = _histogram(
    "kvtier_node_lookup_seconds",
    "Time from the arrival of a look-up to its answer, without waits for stores.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25),
)
NODE_LOOKUP_BLOCKS = _counter(
    "kvtier_node_lookup_blocks_total",
    "Blocks that the node looked up for engines, by their place: memory, arriving, storage, "
    "nowhere, or unknown while a store has not answered. An engine finds blocks again by itself.",
    "tenant",
    "place",
)
NODE_MEMORY_BYTES = _gauge("kvtier_node_memory_bytes", "Host memory of the node.")
NODE_SEGMENT_BYTES = _gauge("kvtier_node_segment_bytes", "Size of a segment of it.")
NODE_FREE_BYTES = _gauge("kvtier_node_free_bytes", "Host memory that belongs to no room.")
NODE_UNVERIFIED_BLOCKS = _gauge(
    "kvtier_node_unverified_blocks",
    "Blocks in memory of the node before that are yet to be verified.",
)
NODE_SLOTS_ASIDE = _gauge(
    "kvtier_node_slots_aside",
    "Slots that engines of the node before may use, and that are not given out.",
)
NODE_CAPACITY_BYTES = _gauge(
    "kvtier_node_capacity_bytes",
    "Capacity of a tier: memory, and the sum of all rooms' slabs or stores.",
    "tier",
)
NODE_ROOM_BYTES = _gauge(
    "kvtier_node_room_bytes", "Bytes of a room's blocks in a tier.", "tenant", "room", "tier"
)
NODE_ROOM_SEGMENTS = _gauge(
    "kvtier_node_room_segments", "Segments of host memory that a room has.", "tenant", "room"
)
NODE_BLOCK_BYTES = _gauge("kvtier_node_block_bytes", "Size of a room's blocks.", "tenant", "room")
NODE_TENANT_BYTES = _gauge("kvtier_node_tenant_bytes", "Host memory of a tenant.", "tenant")
NODE_FLOOR_BYTES = _gauge("kvtier_node_floor_bytes", "Floor of a tenant's quota.", "tenant")
NODE_CEILING_BYTES = _gauge(
    "kvtier_node_ceiling_bytes", "Ceiling of a tenant's quota; all memory if it has none.", "tenant"
)
NODE_PINNED_BYTES = _gauge(
    "kvtier_node_pinned_bytes", "Host memory of a tenant in segments with pinned blocks.", "tenant"
)
NODE_SLAB_BYTES = _gauge(
    "kvtier_node_slab_bytes", "Disk of a tenant's slabs, used or not.", "tenant"
)
NODE_DISK_FLOOR_BYTES = _gauge(
    "kvtier_node_disk_floor_bytes", "Floor of a tenant's disk quota.", "tenant"
)
NODE_DISK_CEILING_BYTES = _gauge(
    "kvtier_node_disk_ceiling_bytes",
    "Ceiling of a tenant's disk quota. A tenant without one has no series.",
    "tenant",
)
NODE_PREFIX = f"{PREFIX}node_"
NODE = _named(NODE_PREFIX)

# kvtier under vLLM.

VLLM_LOADED_CHUNKS = _counter(
    "vllm:kvtier_loaded_chunks_total",
    "Blocks loaded for requests, by the tier that held them.",
    "tier",
    counted_as=HIT_BLOCKS,
)
VLLM_EVICTED_CHUNKS = _counter(
    "vllm:kvtier_evicted_chunks_total",
    "Blocks evicted from a tier.",
    "tier",
    counted_as=EVICTED_BLOCKS,
)
VLLM_MOVED_BYTES = _counter(
    "vllm:kvtier_moved_bytes_total",
    "Bytes read from and written to storage, per rank, through host memory or directly; with "
    "KvtierConnector also those copied between host memory and the device.",
    "src",
    "dst",
    counted_as=COPIED_BYTES,
)
VLLM_MOVED_SECONDS = _counter(
    "vllm:kvtier_moved_seconds_total",
    "Time of these transfers, without queueing.",
    "src",
    "dst",
    counted_as=COPY_SECONDS,
)
VLLM_FAILED_CHUNKS = _counter(
    "vllm:kvtier_failed_chunks_total",
    "Blocks whose transfer failed or whose content was damaged.",
    "src",
    "dst",
    counted_as=FAILED_BLOCKS,
)
VLLM_DAMAGED_CHUNKS = _counter(
    "vllm:kvtier_damaged_chunks_total",
    "Blocks read from storage whose checksum or record did not match.",
    "tier",
    counted_as=DAMAGED_BLOCKS,
)
VLLM_RECOMPUTED_CHUNKS = _counter(
    "vllm:kvtier_recomputed_chunks_total",
    "Blocks found and not loaded, since recomputing them is faster.",
)
VLLM_IMPATIENT_REQUESTS = _counter(
    "vllm:kvtier_impatient_requests_total",
    "Requests that stopped waiting for a load once recomputing would have been faster.",
)
VLLM_NOT_DEMOTED_CHUNKS = _counter(
    "vllm:kvtier_not_demoted_chunks_total",
    "Blocks not written to storage: evicted from host memory first, or over the write budget.",
    "tier",
    counted_as=UNWRITTEN_BLOCKS,
)
VLLM_REFUSED_CHUNKS = _counter(
    "vllm:kvtier_refused_chunks_total",
    "Blocks not stored: every slot of the tier was held or in flight.",
    "tier",
    counted_as=REFUSED_BLOCKS,
)
VLLM_HINT_ACTIONS = _counter("vllm:kvtier_hint_actions_total", _HINTS, "action")
VLLM_RECORDED_REQUESTS = _counter("vllm:kvtier_recorded_requests_total", _RECORDED, "outcome")
VLLM_USED_CHUNKS = _gauge(
    "vllm:kvtier_used_chunks", "Blocks in a tier.", "tier", counted_as=USED_SLOTS
)
VLLM_CHUNKS = _gauge(
    "vllm:kvtier_chunks", "Blocks that a tier has slots for.", "tier", counted_as=SLOTS
)
VLLM_UNCLAIMED_CHUNKS = _gauge(
    "vllm:kvtier_unclaimed_chunks",
    "Blocks found on disk after a restart and not requested since.",
    "tier",
)
SAME_UNDER_ENGINES = (
    AUDITS,
    HINTS,
    PLANNED_BLOCKS,
    PROBED_BLOCKS,
    UNADMITTED_BLOCKS,
    PREDICTED_LOAD_SECONDS,
    ACTUAL_LOAD_SECONDS,
    LOAD_ERROR_RATIO,
    PREDICTED_PREFILL_SECONDS,
    ACTUAL_PREFILL_SECONDS,
    SAVED_TOKENS,
    SAVED_SECONDS,
    RETURNED_BLOCKS,
    RETURN_SECONDS,
    BREAKER_STATE,
    SLOT_BYTES,
    TRANSFERS_IN_FLIGHT,
    QUEUED_SECONDS,
)
"""The cache's metrics that vLLM exports under the same name, with its prefix."""
SHARED_WITH_VLLM = {
    spec: _declare(replace(spec, name=VLLM_PREFIX + spec.name, counted_as=spec))
    for spec in SAME_UNDER_ENGINES
}
"""vLLM's metric by the cache's."""
UNDER_VLLM = _named(f"{VLLM_PREFIX}{PREFIX}")

# kvtier under SGLang: the cache's metrics, and these.

SGLANG_HINT_ACTIONS = _counter("sglang:kvtier_hint_actions_total", _HINTS, "action")
SGLANG_RECORDED_REQUESTS = _counter("sglang:kvtier_recorded_requests_total", _RECORDED, "outcome")

# Metrics of vLLM 0.32 itself that the live page, ``kvtier top`` and the dashboard show.

VLLM_PROMPT_TOKENS = _counter("vllm:prompt_tokens_total", "Tokens in prompts.")
VLLM_PROMPT_TOKENS_CACHED = _counter(
    "vllm:prompt_tokens_cached_total", "Prompt tokens served from caches."
)
VLLM_PROMPT_TOKENS_CACHED_BY_SOURCE = _counter(
    "vllm:prompt_tokens_cached_by_source_total",
    "Prompt tokens served from caches, by source.",
    "source",
)
VLLM_GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Tokens in answers.")
VLLM_REQUEST_SUCCESS = _counter(
    "vllm:request_success_total", "Requests that ended.", "finished_reason"
)
VLLM_NUM_REQUESTS_RUNNING = _gauge("vllm:num_requests_running", "Running requests.")
VLLM_NUM_REQUESTS_WAITING = _gauge("vllm:num_requests_waiting", "Waiting requests.")
VLLM_KV_CACHE_USAGE_PERC = _gauge(
    "vllm:kv_cache_usage_perc", "Share of the device's KV memory in use."
)
VLLM_TIME_TO_FIRST_TOKEN_SECONDS = _histogram(
    "vllm:time_to_first_token_seconds", "Time to the first token."
)
VLLM_E2E_REQUEST_LATENCY_SECONDS = _histogram(
    "vllm:e2e_request_latency_seconds", "Time to the end of an answer."
)
VLLM_KV_OFFLOAD_LOAD_BYTES = _counter(
    "vllm:kv_offload_load_bytes_total", "Bytes copied from host to device."
)
VLLM_KV_OFFLOAD_STORE_BYTES = _counter(
    "vllm:kv_offload_store_bytes_total", "Bytes copied from device to host."
)
VLLM_OWN = tuple(spec for spec in _named(VLLM_PREFIX) if spec not in UNDER_VLLM)

# The same of SGLang 0.5.23.

SGLANG_PROMPT_TOKENS = _counter("sglang:prompt_tokens_total", "Tokens in prompts.")
SGLANG_CACHED_TOKENS = _counter(
    "sglang:cached_tokens_total", "Prompt tokens served from caches, by source.", "cache_source"
)
SGLANG_GENERATION_TOKENS = _counter("sglang:generation_tokens_total", "Tokens in answers.")
SGLANG_NUM_REQUESTS = _counter("sglang:num_requests_total", "Requests that ended.")
SGLANG_NUM_RUNNING_REQS = _gauge("sglang:num_running_reqs", "Running requests.")
SGLANG_NUM_QUEUE_REQS = _gauge("sglang:num_queue_reqs", "Waiting requests.")
SGLANG_TOKEN_USAGE = _gauge("sglang:token_usage", "Share of the device's KV memory in use.")
SGLANG_HICACHE_HOST_USED_TOKENS = _gauge(
    "sglang:hicache_host_used_tokens", "Tokens in SGLang's host memory."
)
SGLANG_HICACHE_HOST_TOTAL_TOKENS = _gauge(
    "sglang:hicache_host_total_tokens", "Tokens that SGLang's host memory has slots for."
)
SGLANG_EVICTED_TOKENS = _counter("sglang:evicted_tokens_total", "Tokens evicted from the device.")
SGLANG_PREFETCHED_TOKENS = _counter("sglang:prefetched_tokens_total", "Tokens read from storage.")
SGLANG_BACKUPED_TOKENS = _counter("sglang:backuped_tokens_total", "Tokens written to storage.")
SGLANG_STORAGE_PREFETCH_HIT_TOKENS = _counter(
    "sglang:storage_prefetch_hit_tokens_total", "Tokens that look-ups found in storage."
)
SGLANG_STORAGE_PREFETCH_UNFULFILLED_TOKENS = _counter(
    "sglang:storage_prefetch_unfulfilled_tokens_total",
    "Tokens found in storage and not used, by reason.",
    "reason",
)
SGLANG_PREFETCH_BANDWIDTH = _histogram(
    "sglang:prefetch_bandwidth", "Rate of a read from storage, GB/s."
)
SGLANG_BACKUP_BANDWIDTH = _histogram("sglang:backup_bandwidth", "Rate of a write to storage, GB/s.")
SGLANG_TIME_TO_FIRST_TOKEN_SECONDS = _histogram(
    "sglang:time_to_first_token_seconds", "Time to the first token."
)
SGLANG_E2E_REQUEST_LATENCY_SECONDS = _histogram(
    "sglang:e2e_request_latency_seconds", "Time to the end of an answer."
)
SGLANG_OWN = tuple(spec for spec in _named("sglang:") if "kvtier" not in spec.name)
