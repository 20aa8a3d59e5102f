"""``--hicache-storage-backend dynamic``: pages of SGLang's host pools in slabs on disk.

SGLang decides what is stored and when it is asked for; what is kept, and what leaves, is the
ladder's business (``shared/slab_calls.py``). It calls from threads of its own: ``exists`` from one,
``get`` from another, ``set`` from a third; each may wait for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtier.connectors.sglang.identity import engine_digest, pool_digest, sources
from kvtier.connectors.sglang.pages import HostPool, Pages
from kvtier.connectors.sglang.refusals import refuse
from kvtier.connectors.sglang.settings import Settings
from kvtier.connectors.sglang.shelf import Shelf, open_shelf
from kvtier.connectors.shared.names import Names

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo

logger = logging.getLogger(__name__)

KV = "kv"
"""SGLang's name of the pool that others stand beside."""


class KvtierStorage(HiCacheStorage):
    """Whatever the disk does after the start is a miss, or a page that was not stored. At the
    start, what can't be served raises ``ConfigError`` or ``LayoutError``: one sentence."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        del kwargs  # SGLang passes none
        self._config = storage_config
        self._settings = Settings.read(storage_config.extra_config or {})
        self._options = _server_args()
        refuse(storage_config, self._options, self._settings)
        self._pools: dict[str, HostPool] = {}
        self._shelves: dict[str, Shelf] = {}
        self._names = Names(self._engine_digest, self._settings.namespace)

    def _engine_digest(self, weights: str) -> bytes:
        return engine_digest(weights, sglang.__version__, self._options, self._settings.namespace)

    # -- pools -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = mem_pool_host

    def on_host_pools_registered(self) -> None:
        """All pools are known: open their slabs."""
        self._names.settle(sources(self._options, self._config))
        capacity_bytes = self._settings.disk_bytes // num_shards(self._config, self._options)
        for name, pool in self._pools.items():
            self._shelves[name] = self._open(name, pool, capacity_bytes)

    def _open(self, name: str, pool: HostPool, capacity_bytes: int) -> Shelf:
        def digest() -> bytes:
            return pool_digest(self._names.digest, self._config, name, pool)

        return open_shelf(self._settings, self._config, name, Pages(pool), capacity_bytes, digest)

    def _shelf(self, name: str = KV) -> Shelf:
        if not self._shelves:  # before 0.5.23 nobody says that all pools are known
            self.on_host_pools_registered()
        return self._shelves[name]

    # -- what SGLang's controller calls ------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._shelf().num_found(keys, _before(extra_info))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        shelf = self._shelf()
        return shelf.load(keys, shelf.pages.at(host_indices))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        shelf = self._shelf()
        return shelf.store(keys, shelf.pages.at(host_indices), _before(extra_info))

    # -- the same for pages in tensors of their own ------------------------------------------------

    def exists(self, key: str) -> bool:
        return self._shelf().num_found([key]) == 1

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,
    ) -> torch.Tensor | None:
        locations = None if target_location is None else [target_location]
        return self.batch_get([key], locations)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        shelf = self._shelf()
        if target_locations is None:
            target_locations = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        are_there = shelf.load(keys, shelf.pages.in_tensors(target_locations))
        pairs = zip(target_locations, are_there, strict=True)
        return [page if is_there else None for page, is_there in pairs]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        if values is None:
            return False
        shelf = self._shelf()
        pages = [each.contiguous() for each in values]
        return all(shelf.store(keys, shelf.pages.in_tensors(pages)))

    # -- upkeep ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        for shelf in self._shelves.values():
            shelf.calls.clear()
        return True

    def close(self) -> None:
        """SGLang's threads have ended. The slabs are free for their next owner."""
        self._names.close()
        while self._shelves:
            _, shelf = self._shelves.popitem()
            shelf.calls.close()


def num_shards(config: HiCacheStorageConfig, options: object) -> int:
    """Slabs of one pool that share this machine's disk."""
    replicas: int = getattr(options, "dp_size", 1) or 1
    machines: int = getattr(options, "nnodes", 1) or 1
    ranks: int = config.pp_size * config.attn_cp_size * replicas
    return max(1, ranks * (1 if config.is_mla_model else config.tp_size) // machines)


def _before(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or []


def _server_args() -> object:
    """SGLang's options; None where nobody has published them, as in a test of one part."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except ValueError:
        return None
