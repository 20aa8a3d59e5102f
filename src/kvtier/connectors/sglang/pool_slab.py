"""One pool's pages on disk: where they lie in memory, and the slab that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.common.slab_calls import SlabCalls
from kvtier.connectors.common.slab_reads import SlabReads
from kvtier.connectors.sglang.identity import StorageConfig, folder_of, is_replicated, page_keys
from kvtier.connectors.sglang.pages import Pages
from kvtier.connectors.sglang.rank_metrics import told_metrics
from kvtier.connectors.sglang.settings import StorageSettings
from kvtier.index.policies.replayed import LRU
from kvtier.layout import opaque
from kvtier.telemetry import Metrics
from kvtier.tiers import Pieces, StorageTier
from kvtier.tiers.disk import DiskReader, goes_straight


@dataclass(frozen=True, slots=True)
class PoolSlab:
    """One pool's slab, called by key as SGLang does.

    before: keys of the pages of the prompt in front of those of a call.
    """

    pages: Pages
    calls: SlabCalls | SlabReads

    def num_found(self, keys: Sequence[str], num_before: int = 0) -> int:
        return self.calls.num_found(page_keys(keys), num_before)

    def find(self, keys: Sequence[str]) -> list[bool]:
        return self.calls.find(page_keys(keys))

    def load(self, keys: Sequence[str], pages: Pieces, before: Sequence[str] = ()) -> list[bool]:
        return self.calls.load(page_keys(keys), pages, page_keys(before))

    def store(self, keys: Sequence[str], pages: Pieces, before: Sequence[str] = ()) -> list[bool]:
        return self.calls.store(page_keys(keys), pages, page_keys(before))


def open_shelf(
    settings: StorageSettings,
    config: StorageConfig,
    name: str,
    pages: Pages,
    capacity_bytes: int,
    digest: Callable[[], bytes],
    replica: int = 0,
    policy: str = LRU,
) -> PoolSlab:
    """The slab of a rank's pool, or a look into that of the rank that writes for all.

    Raises ``ConfigError`` for settings that can't be used, and for a slab that somebody else has; a
    disk that can't be read is left alone, and SGLang serves without it.

    policy: says what leaves first; all but LRU are told of requests.
    """
    group, metrics = opaque(pages.num_bytes), told_metrics(config, name)
    if settings.stores:
        (location,) = settings.stores
        store = open_store(location, group, capacity_bytes, pages.memory)
        return PoolSlab(pages, _calls(settings, store, pages, digest, metrics, policy))
    options = settings.disk_options(folder_of(config, name, replica), capacity_bytes)
    if is_replicated(config, name) and config.tp_rank > 0:
        return PoolSlab(pages, SlabReads(DiskReader(options, group), digest))
    disk = open_disk(options, group, pages.memory if goes_straight(pages.sizes) else None)
    return PoolSlab(pages, _calls(settings, disk, pages, digest, metrics, policy))


def _calls(
    settings: StorageSettings,
    tier: StorageTier,
    pages: Pages,
    digest: Callable[[], bytes],
    metrics: Metrics,
    policy: str,
) -> SlabCalls:
    return SlabCalls(
        tier,
        pages.sizes.tolist(),
        digest,
        hold_s=settings.hold_s,
        block_tokens=pages.page_size,
        always_loads=settings.always_loads,
        policy=policy,
        bytes_per_day=settings.bytes_per_day,
        metrics=metrics,
    )
