"""Table of the metrics of ``kvtier node`` about itself, its engines and its tenants."""

from __future__ import annotations

from kvtier.telemetry.metrics import MetricSpec

LOOKUP_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)

NODE_METRICS = (
    MetricSpec("kvtier_node_info", "gauge", "1; the label names kvtier's version.", ("version",)),
    MetricSpec("kvtier_node_uptime_seconds", "gauge", "Time since the node started."),
    MetricSpec("kvtier_node_engines", "gauge", "Attached engines.", ("tenant",)),
    MetricSpec(
        "kvtier_node_engine_processes",
        "gauge",
        "Processes of an attached engine.",
        ("tenant", "engine"),
    ),
    MetricSpec(
        "kvtier_node_engine_slots",
        "gauge",
        "Slots that an engine reads or writes.",
        ("tenant", "engine"),
    ),
    MetricSpec(
        "kvtier_node_waiting_requests",
        "gauge",
        "Requests of an engine that wait for storage or for another engine.",
        ("tenant", "engine"),
    ),
    MetricSpec(
        "kvtier_node_engine_failures_total",
        "counter",
        "Calls of an engine that the node did not answer in time, as the engine reports them "
        "later.",
        ("tenant", "engine"),
    ),
    MetricSpec(
        "kvtier_node_engine_pauses_total",
        "counter",
        "Times that an engine's breaker opened after several such calls: it computed for a while.",
        ("tenant", "engine"),
    ),
    MetricSpec(
        "kvtier_node_lookup_seconds",
        "histogram",
        "Time from the arrival of a look-up to its answer.",
        buckets=LOOKUP_BUCKETS_S,
    ),
    MetricSpec(
        "kvtier_node_lookup_blocks_total",
        "counter",
        "Blocks that engines looked up, by their place: memory, arriving, storage, nowhere, or "
        "unknown while a store has not answered.",
        ("tenant", "place"),
    ),
    MetricSpec("kvtier_node_memory_bytes", "gauge", "Host memory of the node."),
    MetricSpec("kvtier_node_segment_bytes", "gauge", "Size of a segment of it."),
    MetricSpec("kvtier_node_free_bytes", "gauge", "Host memory that belongs to no room."),
    MetricSpec(
        "kvtier_node_unverified_blocks",
        "gauge",
        "Blocks in memory of the node before that are yet to be verified.",
    ),
    MetricSpec(
        "kvtier_node_slots_aside",
        "gauge",
        "Slots that engines of the node before may use, and that are not given out.",
    ),
    MetricSpec(
        "kvtier_node_capacity_bytes",
        "gauge",
        "Capacity of a tier: memory, and the sum of all rooms' slabs or stores.",
        ("tier",),
    ),
    MetricSpec(
        "kvtier_node_room_bytes",
        "gauge",
        "Bytes of a room's blocks in a tier.",
        ("tenant", "room", "tier"),
    ),
    MetricSpec(
        "kvtier_node_room_segments",
        "gauge",
        "Segments of host memory that a room has.",
        ("tenant", "room"),
    ),
    MetricSpec("kvtier_node_block_bytes", "gauge", "Size of a room's blocks.", ("tenant", "room")),
    MetricSpec("kvtier_node_tenant_bytes", "gauge", "Host memory of a tenant.", ("tenant",)),
    MetricSpec("kvtier_node_floor_bytes", "gauge", "Floor of a tenant's quota.", ("tenant",)),
    MetricSpec(
        "kvtier_node_ceiling_bytes",
        "gauge",
        "Ceiling of a tenant's quota; all memory if it has none.",
        ("tenant",),
    ),
    MetricSpec(
        "kvtier_node_pinned_bytes",
        "gauge",
        "Host memory of a tenant in segments with pinned blocks.",
        ("tenant",),
    ),
    MetricSpec(
        "kvtier_node_slab_bytes", "gauge", "Disk of a tenant's slabs, used or not.", ("tenant",)
    ),
    MetricSpec(
        "kvtier_node_disk_floor_bytes", "gauge", "Floor of a tenant's disk quota.", ("tenant",)
    ),
    MetricSpec(
        "kvtier_node_disk_ceiling_bytes",
        "gauge",
        "Ceiling of a tenant's disk quota. A tenant without one has no series.",
        ("tenant",),
    ),
)
"""The rooms' own metrics have the names of ``METRICS``, with the labels tenant and room."""
