"""``--hicache-storage-backend dynamic``: pages of SGLang's host pools in slabs on disk.

SGLang decides what is stored and when it is read. The ladder decides what is kept and what is
evicted (``common/storage_only.py``). SGLang calls ``exists``, ``get`` and ``set`` from one thread
each; each may wait for the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.utils import is_cpu

from kvtier.connectors.sglang.copies import cpu_copies
from kvtier.connectors.sglang.hicache import prefetches
from kvtier.connectors.sglang.hicache.pool_slab import PoolSlab, open_slab
from kvtier.connectors.sglang.hicache.prefetches import PREFETCHES, RequestReports
from kvtier.connectors.sglang.shared import new_weights, prefill
from kvtier.connectors.sglang.shared.capacity import room
from kvtier.connectors.sglang.shared.hooks import tell_missing
from kvtier.connectors.sglang.shared.identity import page_keys, pool_facts
from kvtier.connectors.sglang.shared.names import PageNames
from kvtier.connectors.sglang.shared.new_weights import NEW_WEIGHTS
from kvtier.connectors.sglang.shared.pages import HostPool, Pages
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.prefix_hits import SidePool, common_hits
from kvtier.connectors.sglang.shared.prompt_reporting import policy_of
from kvtier.connectors.sglang.shared.ranks import replica_of
from kvtier.connectors.sglang.shared.recording import Recording, open_recording
from kvtier.connectors.sglang.shared.settings import StorageSettings
from kvtier.connectors.sglang.shared.shards import host_shards, num_kv_heads, refuse_several
from kvtier.connectors.sglang.shared.unsupported import refuse

try:
    from sglang.srt.runtime_context import get_server_args
except ImportError:  # SGLang 0.5.14
    from sglang.srt.server_args import get_global_server_args as get_server_args

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )

    from kvtier.tiers import Pieces

logger = logging.getLogger(__name__)

KV = "kv"
"""SGLang's name of the KV pool."""
SERVED_POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
GIB = 1 << 30


class KvtierStorage(HiCacheStorage):
    """SGLang's storage back end, on kvtier's slabs.

    At start, configurations that can't be served raise ``ConfigError`` or ``LayoutError``, with one
    sentence. Later, a failure of the disk is a miss, or a page that was not stored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        del kwargs  # SGLang passes none
        self._config = storage_config
        self._settings = StorageSettings.read(storage_config.extra_config or {})
        self._options = _server_args()
        refuse(storage_config, self._options, self._settings)
        self._pools: dict[str, HostPool] = {}
        self._slabs: dict[str, PoolSlab] = {}
        self._opening = RLock()
        self._is_open = False
        self._said: set[str] = set()
        self._transfers = TransferRecorder()
        self._recording: Recording | None = None
        self._requests: RequestReports | None = None
        self._names = PageNames(self._options, self._settings.namespace)

    # -- pools -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._slabs and str(host_pool_name) not in self._slabs:
            logger.warning(
                "kvtier stores no pages of pool=%s: it was registered too late", host_pool_name
            )
        self._pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """Open the slabs. SGLang calls this when all pools are known.

        Before 0.5.23 it does not: then the first of its threads that needs the slabs opens them,
        and the others wait.
        """
        with self._opening:
            if not self._is_open:
                self._open_all()
                self._is_open = True

    def _open_all(self) -> None:
        self._names.settle_engine(self._config)
        pages = {name: Pages(pool) for name, pool in self._pools.items()}
        if self._settings.storage_shards:
            refuse_several(list(pages))
        page_bytes = {name: each.num_bytes for name, each in pages.items()}
        name = "storage_capacity" if self._settings.locations else "disk_capacity"
        num_bytes = self._settings.size(name)
        room_of = room(name, num_bytes, self._config, self._options, page_bytes)
        policy = policy_of(self._settings, self._options, pages, prefetches.reporting_hooks())
        for name, each in pages.items():
            self._slabs[name] = self._open(name, each, room_of[name], policy)
        self._recording = open_recording(
            self._settings, self._config, pages[KV].page_size, replica_of()
        )
        if self._slabs[KV].calls.learns:
            self._requests = RequestReports(self._slabs[KV].calls.on_request, pages[KV].page_size)
            PREFETCHES.listen(self._requests.note)
        WATCH.listen(self._observe_prefill)
        NEW_WEIGHTS.listen(self)
        tell_missing(WATCH.hooks(), prefill.LOSS)
        tell_missing(NEW_WEIGHTS.hooks(), new_weights.LOSS)
        if is_cpu():
            tell_missing(cpu_copies.hooks(), cpu_copies.LOSS)

    def _observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        self._slabs[KV].calls.observe_prefill(num_before, num_tokens, seconds)

    def _open(self, name: str, pages: Pages, capacity_bytes: int, policy: str) -> PoolSlab:
        config, pool, num = self._config, self._pools[name], self._settings.storage_shards
        facts = pool_facts(config, name, pool, pages.sizes.tolist(), num > 0)
        shards = None
        if num:
            num_heads = num_kv_heads(self._options, config.is_mla_model)
            shards = host_shards(num, num_heads, config, pool, pages)
        return open_slab(
            self._settings,
            self._config,
            name,
            pages,
            capacity_bytes,
            self._names.digest_of_part(facts),
            replica_of(),
            policy,
            shards,
        )

    def _slab(self) -> PoolSlab:
        return self._opened()[KV]

    def _opened(self) -> dict[str, PoolSlab]:
        if not self._is_open:
            self.on_host_pools_registered()
        if self._requests is not None:
            self._requests.tell()
        return self._slabs

    # -- called by SGLang's controller -------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._slab().calls.num_found(page_keys(keys), len(_before(extra_info)))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        slab = self._slab()
        return self._load(slab, keys, slab.pages.at(host_indices), _before(extra_info))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        slab = self._slab()
        return self._store(slab, keys, slab.pages.at(host_indices), _before(extra_info))

    def _load(
        self, slab: PoolSlab, keys: list[str], pages: Pieces, before: Sequence[str] = ()
    ) -> list[bool]:
        with self._transfers.timing(True, slab.pages.num_bytes) as are_moved:
            are_moved += slab.calls.load(page_keys(keys), pages, page_keys(before))
        return are_moved

    def _store(
        self, slab: PoolSlab, keys: list[str], pages: Pieces, before: Sequence[str] = ()
    ) -> list[bool]:
        with self._transfers.timing(False, slab.pages.num_bytes) as are_moved:
            are_moved += slab.calls.store(page_keys(keys), pages, page_keys(before))
        return are_moved

    # -- the same calls for several pools ----------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        slabs = self._opened()
        names, num_before = page_keys(keys), len(_before(extra_info))
        num_pages = slabs[KV].calls.num_found(names, num_before)
        sides = {}
        for transfer in pool_transfers or []:
            name, slab = str(transfer.name), slabs.get(str(transfer.name))
            if slab is None or transfer.hit_policy not in SERVED_POLICIES:
                self._say_once(f"kvtier finds nothing in pool {name}, by {transfer.hit_policy}")
                return PoolTransferResult.empty()
            needs_last = transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES
            num_last = max(1, len(transfer.keys or ())) if needs_last else 0
            sides[name] = SidePool(slab.calls.find(names[:num_pages]), num_last)
        hits = common_hits((KV, num_pages), sides)
        found = PoolTransferResult(hits.longest, dict(hits.by_pool))
        found.restorable_prefix_pages = list(hits.cuts)  # unused before 0.5.23
        return found

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        before = _before(extra_info)
        return self._each_pool(
            transfers, lambda slab, keys, pages: self._load(slab, keys, pages, before)
        )

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        before = _before(extra_info)
        return self._each_pool(
            transfers, lambda slab, keys, pages: self._store(slab, keys, pages, before)
        )

    def _each_pool(
        self,
        transfers: list[PoolTransfer],
        move: Callable[[PoolSlab, list[str], Pieces], list[bool]],
    ) -> dict[str, list[bool]]:
        """Return the outcome per page of each pool. Repeated pools' outcomes are concatenated."""
        done: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, slab = transfer.keys or [], self._opened().get(str(transfer.name))
            moved = [False] * len(keys)
            if slab is not None and transfer.host_indices is not None:
                pages = slab.pages.at(transfer.host_indices)
                if len(pages) == len(keys):
                    moved = move(slab, keys, pages)
            done.setdefault(transfer.name, []).extend(moved)
        return done

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    # -- the same calls for pages in tensors of their own ------------------------------------------

    def exists(self, key: str) -> bool:
        return self._slab().calls.num_found(page_keys([key])) == 1

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
        slab = self._slab()
        if target_locations is None:
            target_locations = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        are_there = self._load(slab, keys, slab.pages.in_tensors(target_locations))
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
        slab = self._slab()
        pages = [value.contiguous() for value in values]
        return all(self._store(slab, keys, slab.pages.in_tensors(pages)))

    # -- upkeep ------------------------------------------------------------------------------------

    def before_new_weights(self) -> None:
        """Forget the pages of the old weights, since SGLang's keys stay the same."""
        self.clear()
        self._names.forget()

    def after_new_weights(self) -> None:
        """Give pages names from now on that no other process uses."""
        self._names.disown("its weights were replaced in memory")

    def get_stats(self) -> StorageMetrics:
        """Return the transfers since the last call. Called on the scheduler's thread."""
        reads, writes = self._transfers.take()
        return StorageMetrics(
            prefetch_pgs=reads.pages,
            backup_pgs=writes.pages,
            prefetch_bandwidth=reads.gib_per_s,
            backup_bandwidth=writes.gib_per_s,
        )

    def clear(self) -> bool:
        for slab in self._slabs.values():
            slab.calls.clear()
        return True

    def close(self) -> None:
        """Close the slabs, so that another process may open them. SGLang's threads have ended."""
        if self._slabs:
            WATCH.leave(self._observe_prefill)
            NEW_WEIGHTS.leave(self)
        if self._requests is not None:
            PREFETCHES.leave(self._requests.note)
            self._requests = None
        if self._recording is not None:
            self._recording.close()
            self._recording = None
        self._names.close()
        self._is_open = False
        while self._slabs:
            _, slab = self._slabs.popitem()
            slab.calls.close()


def _before(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or []


def _server_args() -> object:
    """Return SGLang's options; None if they are not published, as outside of an engine."""
    try:
        return get_server_args()
    except ValueError:
        return None


class TransferStats:
    """Pages and GiB/s of each call in one direction, since the last ``take``."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.gib_per_s: list[float] = []


class TransferRecorder:
    """Records calls that move pages. Any thread may record, and any may take."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reads, self._writes = TransferStats(), TransferStats()

    @contextmanager
    def timing(self, is_read: bool, page_bytes: int) -> Iterator[list[bool]]:
        """Time the call in this context, which fills the list with which pages were moved.

        A call that moved none is not recorded.
        """
        are_moved: list[bool] = []
        began = time.perf_counter()
        yield are_moved
        seconds = time.perf_counter() - began
        if num := sum(are_moved):
            with self._lock:
                moved = self._reads if is_read else self._writes
                moved.pages.append(num)
                moved.gib_per_s.append(num * page_bytes / GIB / max(seconds, 1e-9))

    def take(self) -> tuple[TransferStats, TransferStats]:
        """Return the recorded reads and writes, and reset."""
        with self._lock:
            taken = self._reads, self._writes
            self._reads, self._writes = TransferStats(), TransferStats()
            return taken
