"""``--hicache-storage-backend dynamic``: pages of SGLang's host pools in slabs on disk.

SGLang decides what is stored and when it is read. The ladder decides what is kept and what is
evicted (``common/storage_only.py``). SGLang calls ``exists``, ``get`` and ``set`` from one thread
each; each may wait for the disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Lock, RLock
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.utils import is_cpu

from kvtier.cache.block_cache import Change
from kvtier.connectors.common.blocking_calls import BlockingCalls, SlabReads
from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.sglang.copies import cpu_copies
from kvtier.connectors.sglang.hicache.audits import StorageAudits
from kvtier.connectors.sglang.shared import new_weights, prefill
from kvtier.connectors.sglang.shared.client_hints import HintReader
from kvtier.connectors.sglang.shared.hooks import tell_missing
from kvtier.connectors.sglang.shared.identity import page_keys, pool_facts
from kvtier.connectors.sglang.shared.names import PageNames
from kvtier.connectors.sglang.shared.new_weights import NEW_WEIGHTS
from kvtier.connectors.sglang.shared.pages import HostPool, Pages
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.prefix_hits import common_cuts, side_cuts
from kvtier.connectors.sglang.shared.prompt_reporting import (
    MAX_NOTED,
    PREFETCHES,
    QueuedRequest,
    policy_of,
    prefetch_hooks,
)
from kvtier.connectors.sglang.shared.ranks import (
    KV,
    folder_of,
    is_replicated,
    pool_capacities,
    pool_metrics,
    replica_of,
)
from kvtier.connectors.sglang.shared.recording import Recording
from kvtier.connectors.sglang.shared.settings import StorageSettings, served
from kvtier.connectors.sglang.shared.shards import host_shards, num_kv_heads, refuse_several
from kvtier.connectors.sglang.shared.tier_events import TIER_EVENTS
from kvtier.connectors.sglang.shared.unsupported import refuse
from kvtier.layout import opaque
from kvtier.tiers import Pieces, StorageTier
from kvtier.tiers.disk import DiskReader, goes_direct

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

logger = logging.getLogger(__name__)

SERVED_POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
GIB = 1 << 30


class PoolSlab(NamedTuple):
    """One pool: addresses of its pages in memory, and calls to the slab or store that keeps them.

    The calls only read if another rank writes the slab for all.
    """

    pages: Pages
    calls: BlockingCalls | SlabReads


class KvtierStorage(HiCacheStorage):
    """SGLang's storage back end, on kvtier's slabs.

    At start, configurations that can't be served raise ``ConfigError`` or ``LayoutError``, with one
    sentence. Later, a failure of the disk is a miss, or a page that was not stored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        del kwargs  # SGLang passes none
        self._config = storage_config
        self._options = _server_args()
        settings = StorageSettings.read(storage_config.extra_config or {})
        self._settings = settings.titled(*served(self._options))
        refuse(storage_config, self._options, self._settings)
        self._pools: dict[str, HostPool] = {}
        self._slabs: dict[str, PoolSlab] = {}
        self._audits: StorageAudits | None = None
        self._opening = RLock()
        self._is_open = False
        self._said: set[str] = set()
        self._metrics = StorageMetrics()
        self._metrics_lock = Lock()
        self._recording: Recording | None = None
        self._requests: deque[QueuedRequest] = deque(maxlen=MAX_NOTED)
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
        capacities = pool_capacities(name, num_bytes, self._config, self._options, page_bytes)
        policy = policy_of(self._settings, self._options, prefetch_hooks())
        self._publishes = TIER_EVENTS.add(self._options, self._take_changes)
        for name, each in pages.items():
            self._slabs[name] = self._open(name, each, capacities[name], policy)
        page_size = pages[KV].page_size
        self._recording = Recording(self._settings, self._config, page_size, replica_of())
        if self._learns:
            PREFETCHES.listeners.append(self._requests.append)
        self._hints = HintReader(self._settings, self._config, self._requests.append)
        WATCH.step_listeners.append(self._observe_prefill)
        NEW_WEIGHTS.listeners.append(self)
        tell_missing(WATCH.hooks(), prefill.LOSS)
        tell_missing(NEW_WEIGHTS.hooks(), new_weights.LOSS)
        if is_cpu():
            tell_missing(cpu_copies.hooks(), cpu_copies.LOSS)

    def _observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        self._slabs[KV].calls.observe_prefill(num_before, num_tokens, seconds)

    def _take_changes(self) -> Sequence[Change]:
        slab = self._slabs.get(KV)
        return slab.calls.take_changes() if slab else ()

    def _open(self, name: str, pages: Pages, capacity_bytes: int, policy: str) -> PoolSlab:
        """Open the slab or the store of this rank's pages of a pool.

        A disk that can't be read is not used, and SGLang serves without it.

        Raises:
            ConfigError: settings can't be used, or another process has opened the slab.
        """
        settings, config, pool = self._settings, self._config, self._pools[name]
        num_shards = settings.storage_shards
        facts = pool_facts(config, name, pool, pages.sizes.tolist(), num_shards > 0)
        digest = self._names.digest_of_part(facts)
        group = opaque(pages.num_bytes)
        tier: StorageTier
        if settings.locations:
            shards = None
            if num_shards:
                num_heads = num_kv_heads(self._options, config.is_mla_model)
                shards = host_shards(num_shards, num_heads, config, pool, pages)
            (location,) = settings.locations
            tier = open_store(location, settings, group, capacity_bytes, pages.memory, shards)
        else:
            options = settings.disk_options(folder_of(config, name, replica_of()), capacity_bytes)
            if is_replicated(config, name) and config.tp_rank > 0:
                return PoolSlab(pages, SlabReads(DiskReader(options, group), digest))
            tier = open_disk(options, group, pages.memory if goes_direct(pages.sizes) else None)
        metrics = pool_metrics(config, name)
        if settings.audit and name == KV:
            self._audits = StorageAudits(settings.audit, pool, pages, tier.name, digest, metrics)
        calls = BlockingCalls(
            tier,
            pages.sizes.tolist(),
            digest,
            hold_s=settings.hold_s,
            block_tokens=pages.page_size,
            always_loads=settings.always_loads,
            policy=policy,
            bytes_per_day=settings.bytes_per_day,
            metrics=metrics,
            tells_changes=self._publishes and name == KV,
        )
        return PoolSlab(pages, calls)

    @property
    def _learns(self) -> bool:
        """Whether the policy of some pool learns from requests."""
        return any(slab.calls.learns for slab in self._slabs.values())

    def _slab(self) -> PoolSlab:
        return self._opened()[KV]

    def _opened(self) -> dict[str, PoolSlab]:
        if not self._is_open:
            self.on_host_pools_registered()
        self._report_requests()
        return self._slabs

    def _report_requests(self) -> None:
        """Report the requests that have joined the queue, and hints, to the pools' policies."""
        while self._requests:
            try:
                request = self._requests.popleft()
            except IndexError:  # another thread was faster
                return
            keys = request.keys(self._slabs[KV].pages.page_size)
            for slab in self._slabs.values() if keys else ():
                if request.hint:
                    slab.calls.hint(keys, request.hint)
                else:
                    slab.calls.on_request(keys)

    # -- called by SGLang's controller -------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._num_to_load(self._keys(keys), len(_before(extra_info)))

    def _num_to_load(self, keys: list[bytes], num_before: int) -> int:
        num = self._num_found(keys, num_before)
        return self._audits.limit(keys, num_before, num) if self._audits else num

    def _num_found(self, keys: list[bytes], num_before: int = 0) -> int:
        if not self._settings.mode.loads or self._is_closed:
            return 0
        return self._slab().calls.num_found(keys, num_before)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        """Return pages under the present name of their namespace."""
        own = page_keys(keys)
        return self._audits.keyed(own) if self._audits else own

    @property
    def _is_closed(self) -> bool:
        return self._audits is not None and self._audits.is_closed

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        slab = self._slab()
        return self._move(slab, keys, slab.pages.at(host_indices), extra_info, is_load=True)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        slab = self._slab()
        return self._move(slab, keys, slab.pages.at(host_indices), extra_info, is_load=False)

    def _move(
        self,
        slab: PoolSlab,
        keys: list[str],
        pages: Pieces,
        extra_info: HiCacheStorageExtraInfo | None = None,
        *,
        is_load: bool,
    ) -> list[bool]:
        """Load or store pages; return for each whether it was moved. Measure the call."""
        calls = slab.calls
        if self._audits and not is_load and slab is self._slab():
            assert isinstance(calls, BlockingCalls), "this rank stores its pages"
            self._audits.compare(self._keys(keys), pages, calls)
        if self._is_closed or not (is_load or self._settings.mode.stores):
            # SGLang would log a warning for every page that was not stored.
            return [not is_load] * len(keys)
        move = calls.load if is_load else calls.store
        began_s = time.perf_counter()
        are_moved = move(self._keys(keys), pages, self._keys(_before(extra_info)))
        took_s = max(time.perf_counter() - began_s, 1e-9)
        if num := sum(are_moved):
            gib_per_s = num * slab.pages.num_bytes / GIB / took_s
            with self._metrics_lock:
                metrics = self._metrics
                (metrics.prefetch_pgs if is_load else metrics.backup_pgs).append(num)
                speeds = metrics.prefetch_bandwidth if is_load else metrics.backup_bandwidth
                speeds.append(gib_per_s)
        return are_moved

    # -- the same calls for several pools ----------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        self._note_reach(pool_transfers or ())
        slabs = self._opened()
        names, num_before = self._keys(keys), len(_before(extra_info))
        num_pages = self._num_to_load(names, num_before)
        sides: dict[str, list[int]] = {}
        for transfer in pool_transfers or []:
            name, slab = str(transfer.name), slabs.get(str(transfer.name))
            if slab is None or transfer.hit_policy not in SERVED_POLICIES:
                self._say_once(f"kvtier finds nothing in pool {name}, by {transfer.hit_policy}")
                return PoolTransferResult.empty()
            needs_last = transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES
            num_last = max(1, len(transfer.keys or ())) if needs_last else 0
            sides[name] = side_cuts(slab.calls.find(names[:num_pages]), num_last, num_pages)
        cuts = list(common_cuts(num_pages, sides))
        longest = {KV: num_pages, **{name: own[-1] for name, own in sides.items() if own}}
        found = PoolTransferResult(cuts[-1] if cuts else 0, longest if num_pages else {})
        found.restorable_prefix_pages = cuts  # unused before 0.5.23
        return found

    def _note_reach(self, transfers: Sequence[PoolTransfer]) -> None:
        """Note how many pages in front of a cut the pools keep, before requests are reported."""
        for transfer in transfers:
            slab, num_last = self._slabs.get(str(transfer.name)), len(transfer.keys or ())
            if slab and transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                slab.calls.set_num_last(max(1, num_last))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self._move_pools(transfers, extra_info, is_load=True)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self._move_pools(transfers, extra_info, is_load=False)

    def _move_pools(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        is_load: bool,
    ) -> dict[str, list[bool]]:
        """Return the outcome per page of each pool. Repeated pools' outcomes are concatenated."""
        done: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, slab = transfer.keys or [], self._opened().get(str(transfer.name))
            moved = [False] * len(keys)
            if slab is not None and transfer.host_indices is not None:
                pages = slab.pages.at(transfer.host_indices)
                if len(pages) == len(keys):
                    moved = self._move(slab, keys, pages, extra_info, is_load=is_load)
            done.setdefault(transfer.name, []).extend(moved)
        return done

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    # -- the same calls for pages in tensors of their own ------------------------------------------

    def exists(self, key: str) -> bool:
        return self._num_found(self._keys([key])) == 1

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
        pages = slab.pages.in_tensors(target_locations)
        are_there = self._move(slab, keys, pages, is_load=True)
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
        tensors = [value.contiguous() for value in values]
        return all(self._move(slab, keys, slab.pages.in_tensors(tensors), is_load=False))

    # -- upkeep ------------------------------------------------------------------------------------

    def before_new_weights(self) -> None:
        """Forget the pages of the old weights, since SGLang's keys stay the same."""
        self.clear()
        self._names.forget()
        if self._audits:
            self._audits.reset()

    def after_new_weights(self) -> None:
        """Give pages names from now on that no other process uses."""
        self._names.disown("its weights were replaced in memory")

    def get_stats(self) -> StorageMetrics:
        """Return the transfers since the last call. Called on the scheduler's thread."""
        with self._metrics_lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def clear(self) -> bool:
        for slab in self._slabs.values():
            slab.calls.clear()
        return True

    def close(self) -> None:
        """Close the slabs, so that another process may open them. SGLang's threads have ended."""
        if self._is_open:
            WATCH.step_listeners.remove(self._observe_prefill)
            NEW_WEIGHTS.listeners.remove(self)
            TIER_EVENTS.remove(self._take_changes)
            if self._learns:
                PREFETCHES.listeners.remove(self._requests.append)
            self._hints.close()
            self._requests.clear()
        if self._recording is not None:
            self._recording.close()
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
