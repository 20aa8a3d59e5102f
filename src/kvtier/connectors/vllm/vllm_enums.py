"""vLLM's names for kvtier's tiers, and its events of blocks in them."""

from __future__ import annotations

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.keyed.cache import BlockLocation
from kvtier.types import DISK, HOST

FOUND = {
    BlockLocation.NOWHERE: LookupResult.MISS,
    BlockLocation.ARRIVING: LookupResult.HIT_PENDING,
    BlockLocation.MEMORY: LookupResult.HIT,
    BlockLocation.STORAGE: LookupResult.RETRY,
    BlockLocation.UNKNOWN: LookupResult.RETRY,
}
KINDS = {HOST: (Medium.CPU, Locality.LOCAL), DISK: (Medium.STORAGE, Locality.LOCAL)}
SOURCES = {HOST: CacheHitSource.HOST, DISK: CacheHitSource.DISK}


def kind_of(tier: str) -> tuple[Medium, Locality]:
    """Medium and place. Whatever is not ours alone is a store, which is elsewhere."""
    return KINDS.get(tier, (Medium.STORAGE, Locality.REMOTE))


def source_of(tier: str) -> CacheHitSource:
    """Under which name hits are counted. vLLM has none for stores."""
    return SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
