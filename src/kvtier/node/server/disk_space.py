"""Division of a node's disk space over the slabs of its partitions.

A slab has its full size from the start, and keeps it. So quotas decide how large a new slab may be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from kvtier.node.config import TenantQuota
from kvtier.node.server.partition_key import PartitionKey
from kvtier.tiers.disk.format.folder import DATA

logger = logging.getLogger(__name__)

LEAST_BLOCKS = 16
"""A slab that would have less room than this is not made."""


class DiskSpace:
    """Sizes of the slabs in a directory, finished or in the making. Any thread may use it.

    Args:
        folder: the directory; "" for none.
        slab_bytes: most bytes of a slab.
        total_bytes: most bytes of all slabs; None for no bound.
        quotas: return the quotas by tenant.
    """

    def __init__(
        self,
        folder: str,
        slab_bytes: int,
        total_bytes: int | None,
        quotas: Callable[[], Mapping[str, TenantQuota]],
    ) -> None:
        self._folder = Path(folder)
        self._slab_bytes = slab_bytes
        self._total_bytes = total_bytes
        self._quotas = quotas
        self._lock = Lock()
        self._sizes: dict[PartitionKey, int] = {}
        for data in self._folder.glob(f"*/{DATA}") if folder else ():
            key = PartitionKey.of_folder(data.parent.name)
            if key is not None:
                with suppress(OSError):  # the partition is served without the disk
                    self._sizes[key] = data.stat().st_size

    @contextmanager
    def slab_of(self, key: PartitionKey) -> Iterator[int]:
        """Yield the size of a partition's slab, which may be made meanwhile; 0 if there is no room.

        A slab that is there keeps its size. If it can't be made, its space is free again.
        """
        data = self._folder / key.folder / DATA
        with self._lock:
            size = self._sizes.get(key) or self._new_size(key)
            if size:
                self._sizes[key] = size
        try:
            yield size
        finally:
            if size and not data.exists():
                with self._lock:
                    self._sizes.pop(key, None)

    def _new_size(self, key: PartitionKey) -> int:
        held = self._held()
        size = self._slab_bytes
        quotas = self._quotas()
        ceiling = quotas.get(key.tenant, TenantQuota()).disk_ceiling
        if ceiling is not None:
            size = min(size, ceiling - held[key.tenant])
        if self._total_bytes is not None:
            owed = sum(
                max(0, quota.disk_floor - held[tenant])
                for tenant, quota in quotas.items()
                if tenant != key.tenant
            )
            size = min(size, self._total_bytes - held.total() - owed)
        return size if size >= LEAST_BLOCKS * key.block_bytes else 0

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for key, size in self._sizes.items():
            held[key.tenant] += size
        return held

    def held_by(self, tenant: str) -> int:
        """Return the bytes of a tenant's slabs."""
        with self._lock:
            return self._held()[tenant]
