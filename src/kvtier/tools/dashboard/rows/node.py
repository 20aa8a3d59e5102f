"""Nodes: who uses them, how memory is divided, and how fast they answer."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelRow, Query, Unit
from kvtier.tools.dashboard.queries import share
from kvtier.tools.dashboard.rows.common import LATELY, NOW, QUANTILES, TOO_FEW, quantiles

_LOOKED_UP = "kvtier_node_lookup_blocks_total"

NODE = PanelRow(
    "Nodes",
    (
        Panel(
            "Looked-up blocks found",
            "Share of the blocks that engines of a tenant looked up and that were there, by place.",
            Unit.SHARE,
            (
                Query(
                    share(
                        LATELY.rate(_LOOKED_UP, "tenant", "place", where='place=~"memory|storage"'),
                        LATELY.rate(_LOOKED_UP, "tenant"),
                        ("tenant",),
                    ),
                    "{{tenant}} {{place}}",
                ),
            ),
            highest=1,
            without="no look-ups in this window",
        ),
        Panel(
            "Look-up time",
            f"Time from the arrival of a look-up to its answer. Engines wait 5 ms. {QUANTILES}",
            Unit.SECONDS,
            quantiles("kvtier_node_lookup_seconds", legend=""),
            without=TOO_FEW,
        ),
        Panel(
            "Late calls and pauses of engines",
            "Calls that were not answered in time, and how often an engine's breaker opened after "
            "three of them in a row: it computes for a while. Engines report both later.",
            Unit.PER_S,
            (
                Query(
                    NOW.rate("kvtier_node_engine_failures_total", "tenant", "engine"),
                    "{{tenant}} {{engine}} late calls",
                ),
                Query(
                    NOW.rate("kvtier_node_engine_pauses_total", "tenant", "engine"),
                    "{{tenant}} {{engine}} pauses",
                ),
            ),
        ),
        Panel(
            "Waiting requests",
            "Requests that wait for storage or for another engine.",
            Unit.NUMBER,
            (
                Query(
                    NOW.level("kvtier_node_waiting_requests", "tenant", "engine"),
                    "{{tenant}} {{engine}}",
                ),
            ),
        ),
        Panel(
            "Engines and their processes",
            "Attached engines of each tenant, and the processes of each engine.",
            Unit.NUMBER,
            (
                Query(NOW.level("kvtier_node_engines", "tenant"), "engines of {{tenant}}"),
                Query(
                    NOW.level("kvtier_node_engine_processes", "tenant", "engine"),
                    "processes of {{tenant}} {{engine}}",
                ),
            ),
        ),
        Panel(
            "Slots in use by engines",
            "Slots that engines read or write. They are free when the engine says so, or when its "
            "processes have ended.",
            Unit.NUMBER,
            (
                Query(
                    NOW.level("kvtier_node_engine_slots", "tenant", "engine"),
                    "{{tenant}} {{engine}}",
                ),
            ),
        ),
        Panel(
            "Left by the node before",
            "After a crash of the node: blocks that are yet to be verified, and slots that engines "
            "of the node before may still use.",
            Unit.NUMBER,
            (
                Query(NOW.level("kvtier_node_unverified_blocks"), "blocks to verify"),
                Query(NOW.level("kvtier_node_slots_aside"), "slots aside"),
            ),
        ),
        Panel(
            "Host memory by tenant",
            "Memory of each tenant between its floor and its ceiling, what of it is pinned, and "
            "what is free.",
            Unit.BYTES,
            (
                Query(NOW.level("kvtier_node_tenant_bytes", "tenant"), "{{tenant}}"),
                Query(NOW.level("kvtier_node_pinned_bytes", "tenant"), "{{tenant}} pinned"),
                Query(NOW.level("kvtier_node_floor_bytes", "tenant"), "{{tenant}} floor"),
                Query(NOW.level("kvtier_node_ceiling_bytes", "tenant"), "{{tenant}} ceiling"),
                Query(NOW.level("kvtier_node_free_bytes"), "free"),
                Query(NOW.level("kvtier_node_memory_bytes"), "all"),
            ),
        ),
        Panel(
            "Disk by tenant",
            "Slabs of each tenant on disk, used or not, between its floor and its ceiling.",
            Unit.BYTES,
            (
                Query(NOW.level("kvtier_node_slab_bytes", "tenant"), "{{tenant}}"),
                Query(NOW.level("kvtier_node_disk_floor_bytes", "tenant"), "{{tenant}} floor"),
                Query(NOW.level("kvtier_node_disk_ceiling_bytes", "tenant"), "{{tenant}} ceiling"),
            ),
        ),
        Panel(
            "Bytes by tenant and tier",
            "Bytes of each tenant's blocks in each tier, and what each tier has in all.",
            Unit.BYTES,
            (
                Query(NOW.level("kvtier_node_room_bytes", "tenant", "tier"), "{{tenant}} {{tier}}"),
                Query(NOW.level("kvtier_node_capacity_bytes", "tier"), "{{tier}} in all"),
            ),
        ),
        Panel(
            "Segments by room",
            "Segments of host memory that each room has: the cache of one model for one tenant.",
            Unit.NUMBER,
            (Query(NOW.level("kvtier_node_room_segments", "room"), "{{room}}"),),
        ),
        Panel(
            "Block and segment sizes",
            "A segment holds blocks of one room's size at a time.",
            Unit.BYTES,
            (
                Query(NOW.highest("kvtier_node_block_bytes", "room"), "blocks of {{room}}"),
                Query(NOW.highest("kvtier_node_segment_bytes"), "segments"),
            ),
        ),
        Panel(
            "Node",
            "Time since the node started, and its version.",
            Unit.SECONDS,
            (
                Query(NOW.highest("kvtier_node_uptime_seconds"), "uptime"),
                Query(NOW.level("kvtier_node_info", "version"), "kvtier {{version}}"),
            ),
        ),
    ),
)
