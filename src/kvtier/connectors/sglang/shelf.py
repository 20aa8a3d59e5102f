"""One pool's pages on disk: where they lie in memory, and the slab that keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.connectors.sglang.identity import StorageConfig, folder_of, is_replicated, page_keys
from kvtier.connectors.sglang.pages import Pages
from kvtier.connectors.sglang.settings import Settings
from kvtier.connectors.shared.slab_calls import SlabCalls
from kvtier.connectors.shared.slab_reads import SlabReads
from kvtier.errors import ConfigError, TierError
from kvtier.layout import KVGroup, opaque
from kvtier.tiers import Pieces, StorageTier
from kvtier.tiers.disk import DiskOptions, DiskReader, DiskTier
from kvtier.tiers.none import NoStorage
from kvtier.types import DISK, Durability, LoadPolicy, Verify

logger = logging.getLogger(__name__)

SLOT_BYTES = 4096
"""A page takes a multiple of so many on disk."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What SGLang calls by key, in the words of the slab. before: keys of the pages of the prompt
    that come before those of a call."""

    pages: Pages
    calls: SlabCalls | SlabReads

    def num_found(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        return self.calls.num_found(page_keys(keys), page_keys(before))

    def find(self, keys: Sequence[str], before: Sequence[str] = ()) -> list[bool]:
        return self.calls.find(page_keys(keys), page_keys(before))

    def load(self, keys: Sequence[str], pages: Pieces) -> list[bool]:
        return self.calls.load(page_keys(keys), pages)

    def store(self, keys: Sequence[str], pages: Pieces, before: Sequence[str] = ()) -> list[bool]:
        return self.calls.store(page_keys(keys), pages, page_keys(before))


def capacities(
    settings: Settings, config: StorageConfig, options: object, pools: Mapping[str, Pages]
) -> dict[str, int]:
    """Bytes of this rank's slab for each pool: all get room for as many pages. options: SGLang's
    ``ServerArgs``, or None. Raises ``ConfigError`` where that is not a single one."""
    replicas: int = getattr(options, "dp_size", 1) or 1
    machines: int = getattr(options, "nnodes", 1) or 1
    groups = config.pp_size * config.attn_cp_size * replicas / machines
    slots = {name: -(-pages.num_bytes // SLOT_BYTES) * SLOT_BYTES for name, pages in pools.items()}
    bytes_per_page = sum(
        num_bytes * (1 if is_replicated(config, name) else config.tp_size) * groups
        for name, num_bytes in slots.items()
    )
    num_pages = int(settings.disk_bytes / bytes_per_page)
    if num_pages < 1:
        raise ConfigError(
            f"disk_capacity: {settings.disk_bytes} bytes are below one page of all ranks and pools "
            f"({bytes_per_page:.0f} bytes); raise it"
        )
    return {name: num_pages * num_bytes for name, num_bytes in slots.items()}


def open_shelf(
    settings: Settings,
    config: StorageConfig,
    name: str,
    pages: Pages,
    capacity_bytes: int,
    digest: Callable[[], bytes],
    replica: int = 0,
) -> Shelf:
    """The slab of a rank's pool, or a look into that of the rank that writes for all. Raises
    ``ConfigError`` for settings that can't be used, and for a slab that somebody else has; a disk
    that can't be read is left alone, and SGLang serves without it."""
    group = opaque(pages.num_bytes)
    options = DiskOptions(
        settings.folder / folder_of(config, name, replica),
        capacity_bytes,
        durability=Durability(settings.disk_durability),
        verify=Verify(settings.disk_verify),
    )
    if is_replicated(config, name) and config.tp_rank > 0:
        return Shelf(pages, SlabReads(DiskReader(options, group), digest))
    calls = SlabCalls(
        _open(options, group),
        pages.sizes.tolist(),
        digest,
        hold_s=settings.hold_s,
        block_tokens=0 if settings.load_policy == LoadPolicy.ALWAYS else pages.page_size,
        bytes_per_day=settings.bytes_per_day,
    )
    return Shelf(pages, calls)


def _open(options: DiskOptions, group: KVGroup) -> StorageTier:
    try:
        tier = DiskTier(options, group)
    except TierError as error:
        logger.error("kvtier: SGLang serves without the disk: %s", error)
        return NoStorage(DISK, group)
    for finding in tier.findings():
        logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)
    return tier
