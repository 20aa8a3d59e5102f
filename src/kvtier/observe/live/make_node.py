"""Make the part of a picture that only a node has, from readings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvtier.observe import MetricSpec, specs
from kvtier.observe.live.differences import grown, mean, quantile, rate, ratio
from kvtier.observe.live.picture import NodeEngine, NodePicture, NodeRoomUse, NodeTenant, Tier
from kvtier.observe.live.reading import Reading

LEAST_BLOCKS = 100.0
"""Least looked-up blocks for which the share that was found is shown."""
PLACES = specs.NODE_LOOKUP_BLOCKS.name
TIMES = specs.NODE_LOOKUP_SECONDS.name
FOUND = ("memory", "storage")


def make_node(first: Reading, now: Reading, busy: tuple[Reading, Reading]) -> NodePicture:
    """Make the picture of a node. Arguments: see ``make_picture``."""
    return NodePicture(
        now.total(specs.NODE_MEMORY_BYTES.name) or 0.0,
        now.total(specs.NODE_FREE_BYTES.name) or 0.0,
        now.total(specs.NODE_SEGMENT_BYTES.name) or 0.0,
        rate(first, now, f"{TIMES}_count"),
        mean(*busy, TIMES),
        quantile(*busy, TIMES, 0.95),
        quantile(*busy, TIMES, 0.99),
        tuple(_engines(first, now)),
        tuple(_tenants(now, busy)),
        tuple(_rooms(now)),
    )


def tiers_of_node(tiers: Iterable[Tier], now: Reading) -> tuple[Tier, ...]:
    """Return tiers in bytes: a node's rooms have blocks of different sizes, so slots say little."""
    return tuple(_in_bytes(tier, now) for tier in tiers)


def _in_bytes(tier: Tier, now: Reading) -> Tier:
    used = now.total(specs.NODE_ROOM_BYTES.name, tier=tier.name) or 0.0
    capacity = now.total(specs.NODE_CAPACITY_BYTES.name, tier=tier.name)
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
    titles = {
        (labels["tenant"], labels["engine"]): labels["title"]
        for labels in _series(now, specs.NODE_ENGINE_INFO.name)
    }
    for labels in _series(now, specs.NODE_ENGINE_PROCESSES.name):
        name, tenant = labels["engine"], labels["tenant"]

        def told(metric: MetricSpec, at: dict[str, str] = labels) -> float:
            return now.total(metric.name, **at) or 0.0

        yield NodeEngine(
            titles.get((tenant, name), name),
            tenant,
            told(specs.NODE_ENGINE_PROCESSES),
            told(specs.NODE_ENGINE_SLOTS),
            told(specs.NODE_WAITING_REQUESTS),
            told(specs.NODE_ENGINE_FAILURES),
            told(specs.NODE_ENGINE_PAUSES),
            grown(first, now, specs.NODE_ENGINE_PAUSES.name, **labels),
        )


def _tenants(now: Reading, busy: tuple[Reading, Reading]) -> Iterable[NodeTenant]:
    for name in sorted(now.by(specs.NODE_FLOOR_BYTES.name, "tenant")):

        def told(metric: MetricSpec, tenant: str = name) -> float:
            return now.total(metric.name, tenant=tenant) or 0.0

        found = [grown(*busy, PLACES, tenant=name, place=place) or 0.0 for place in FOUND]
        yield NodeTenant(
            name,
            told(specs.NODE_ENGINES),
            told(specs.NODE_TENANT_BYTES),
            told(specs.NODE_PINNED_BYTES),
            told(specs.NODE_FLOOR_BYTES),
            told(specs.NODE_CEILING_BYTES),
            _by_tier(now, tenant=name),
            told(specs.NODE_SLAB_BYTES),
            told(specs.NODE_DISK_FLOOR_BYTES),
            now.total(specs.NODE_DISK_CEILING_BYTES.name, tenant=name),
            ratio(sum(found), grown(*busy, PLACES, tenant=name), LEAST_BLOCKS),
        )


def _rooms(now: Reading) -> Iterable[NodeRoomUse]:
    for labels in _series(now, specs.NODE_BLOCK_BYTES.name):
        yield NodeRoomUse(
            labels["room"],
            labels["tenant"],
            now.total(specs.NODE_BLOCK_BYTES.name, **labels) or 0.0,
            now.total(specs.NODE_ROOM_SEGMENTS.name, **labels) or 0.0,
            _by_tier(now, **labels),
        )


def _by_tier(now: Reading, **labels: str) -> dict[str, float]:
    tiers = now.by(specs.NODE_CAPACITY_BYTES.name, "tier")
    return {
        tier: now.total(specs.NODE_ROOM_BYTES.name, tier=tier, **labels) or 0.0 for tier in tiers
    }


def _series(now: Reading, name: str) -> list[dict[str, str]]:
    """Return the labels of a metric's series, in alphabetical order."""
    return [dict(labels) for labels in sorted(now.values.get(name, {}))]
