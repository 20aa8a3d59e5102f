"""Make the part of a picture that only a node has, from readings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from kvtier.live.differences import grown, rate, ratio
from kvtier.live.picture import NodeEngine, NodePicture, NodeRoomUse, NodeTenant, Tier
from kvtier.live.reading import Reading

LEAST_BLOCKS = 100.0
"""Least looked-up blocks for which the share that was found is shown."""
LEAST_LOOKUPS = {0.5: 10.0, 0.99: 500.0}
"""Least look-ups for which a quantile of their times is shown."""
PLACES = "kvtier_node_lookup_blocks_total"
TIMES = "kvtier_node_lookup_seconds"
FOUND = ("memory", "storage")


def make_node(first: Reading, now: Reading) -> NodePicture:
    """Make the picture of a node.

    first: the oldest reading of the last minute; may be ``now``. now: the latest reading.
    """
    return NodePicture(
        now.total("kvtier_node_memory_bytes") or 0.0,
        now.total("kvtier_node_free_bytes") or 0.0,
        now.total("kvtier_node_segment_bytes") or 0.0,
        rate(first, now, f"{TIMES}_count"),
        _quantile(first, now, 0.5),
        _quantile(first, now, 0.99),
        tuple(_engines(first, now)),
        tuple(_tenants(first, now)),
        tuple(_rooms(now)),
    )


def tiers_of_node(tiers: Iterable[Tier], now: Reading) -> tuple[Tier, ...]:
    """Return tiers in bytes: a node's rooms have blocks of different sizes, so slots say little."""
    return tuple(_in_bytes(tier, now) for tier in tiers)


def _in_bytes(tier: Tier, now: Reading) -> Tier:
    used = now.total("kvtier_node_room_bytes", tier=tier.name) or 0.0
    capacity = now.total("kvtier_node_capacity_bytes", tier=tier.name)
    per_block = used / tier.used if tier.used else None
    leaving = tier.evicted_per_s * per_block if tier.evicted_per_s and per_block else None
    return replace(
        tier,
        slots=None,
        used_bytes=used,
        capacity_bytes=capacity,
        fill=min(1.0, used / capacity) if capacity else None,
        turnover_s=capacity / leaving if capacity and leaving else None,
    )


def _engines(first: Reading, now: Reading) -> Iterable[NodeEngine]:
    for labels in _series(now, "kvtier_node_engine_processes"):
        name, tenant = labels["engine"], labels["tenant"]

        def told(what: str, at: dict[str, str] = labels) -> float:
            return now.total(f"kvtier_node_{what}", **at) or 0.0

        yield NodeEngine(
            name,
            tenant,
            told("engine_processes"),
            told("engine_slots"),
            told("waiting_requests"),
            told("engine_failures_total"),
            told("engine_pauses_total"),
            grown(first, now, "kvtier_node_engine_pauses_total", **labels),
        )


def _tenants(first: Reading, now: Reading) -> Iterable[NodeTenant]:
    for name in sorted(now.by("kvtier_node_floor_bytes", "tenant")):

        def told(what: str, tenant: str = name) -> float:
            return now.total(f"kvtier_node_{what}", tenant=tenant) or 0.0

        found = [grown(first, now, PLACES, tenant=name, place=place) or 0.0 for place in FOUND]
        yield NodeTenant(
            name,
            told("engines"),
            told("tenant_bytes"),
            told("pinned_bytes"),
            told("floor_bytes"),
            told("ceiling_bytes"),
            _by_tier(now, tenant=name),
            told("slab_bytes"),
            told("disk_floor_bytes"),
            now.total("kvtier_node_disk_ceiling_bytes", tenant=name),
            ratio(sum(found), grown(first, now, PLACES, tenant=name), LEAST_BLOCKS),
        )


def _rooms(now: Reading) -> Iterable[NodeRoomUse]:
    for labels in _series(now, "kvtier_node_block_bytes"):
        yield NodeRoomUse(
            labels["room"],
            labels["tenant"],
            now.total("kvtier_node_block_bytes", **labels) or 0.0,
            now.total("kvtier_node_room_segments", **labels) or 0.0,
            _by_tier(now, **labels),
        )


def _by_tier(now: Reading, **labels: str) -> dict[str, float]:
    tiers = now.by("kvtier_node_capacity_bytes", "tier")
    return {tier: now.total("kvtier_node_room_bytes", tier=tier, **labels) or 0.0 for tier in tiers}


def _series(now: Reading, name: str) -> list[dict[str, str]]:
    """Return the labels of a metric's series, in alphabetical order."""
    return [dict(labels) for labels in sorted(now.values.get(name, {}))]


def _quantile(first: Reading, now: Reading, part: float) -> float | None:
    """Return the end of the bucket below which a share of the last minute's look-ups stayed.

    None if they were too few; infinite for the last bucket.
    """
    name = f"{TIMES}_bucket"
    counts = [
        (float(le), grown(first, now, name, le=le) or 0.0)
        for le in now.by(name, "le")
        if le != "+Inf"
    ]
    num = grown(first, now, f"{TIMES}_count")
    if num is None or num < LEAST_LOOKUPS[part]:
        return None
    return next((end for end, below in sorted(counts) if below >= part * num), inf)
