"""What vLLM calls our tiers, and what it is told of blocks in them."""

from __future__ import annotations

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.keyed_cache import Place
from kvtier.types import DISK, HOST

FOUND = {
    Place.NOWHERE: LookupResult.MISS,
    Place.ARRIVING: LookupResult.HIT_PENDING,
    Place.MEMORY: LookupResult.HIT,
    Place.STORAGE: LookupResult.RETRY,
    Place.UNKNOWN: LookupResult.RETRY,
}
KINDS = {HOST: (Medium.CPU, Locality.LOCAL), DISK: (Medium.STORAGE, Locality.LOCAL)}
SOURCES = {HOST: CacheHitSource.HOST, DISK: CacheHitSource.DISK}


def kind_of(tier: str) -> tuple[Medium, Locality]:
    """Medium and place. Whatever is not ours alone is a store, which is elsewhere."""
    return KINDS.get(tier, (Medium.STORAGE, Locality.REMOTE))


def source_of(tier: str) -> CacheHitSource:
    """Under which name hits are counted. vLLM has none for stores."""
    return SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
