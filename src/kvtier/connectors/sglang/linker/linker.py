"""``--enable-unified-cache-external-linker``: between SGLang's device pools and kvtier's tiers.

SGLang's tree looks up each prompt here, beyond the pages on the device. ``lookup()`` reports only
pages in host memory, so a load can fail only if the device fails. Pages in storage are promoted to
host memory meanwhile (``promotion.py``), and requests wait for them (``scheduler_hooks.py``).

The scheduler makes all calls, on its thread, in the same order on every rank. Answers may differ
between ranks, since SGLang uses what all ranks have. But every rank must answer, so no method
raises.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from blake3 import blake3
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvtier.cache.block_cache import Change
from kvtier.cache.transfer import TransferEngine
from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.common.pool_copies import PoolCopies, Store, open_cache
from kvtier.connectors.sglang.linker import scheduler_hooks
from kvtier.connectors.sglang.linker.audits import LinkerAudits
from kvtier.connectors.sglang.linker.loading import Loading, PoolTiers
from kvtier.connectors.sglang.linker.promotion import PromptPromotion, WaitingPrompt
from kvtier.connectors.sglang.shared import new_weights, prefill
from kvtier.connectors.sglang.shared.client_hints import HintReader
from kvtier.connectors.sglang.shared.device_pools import DevicePool, find_pools
from kvtier.connectors.sglang.shared.hooks import tell_missing
from kvtier.connectors.sglang.shared.identity import page_keys, pool_facts
from kvtier.connectors.sglang.shared.names import PageNames
from kvtier.connectors.sglang.shared.new_weights import NEW_WEIGHTS
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.prompt_reporting import (
    PromptReporter,
    QueuedRequest,
    policy_of,
)
from kvtier.connectors.sglang.shared.ranks import (
    KV,
    RankConfig,
    folder_of,
    pool_capacities,
    pool_metrics,
    replica_of,
    slot_bytes,
)
from kvtier.connectors.sglang.shared.recording import Recording
from kvtier.connectors.sglang.shared.settings import LinkerSettings, served
from kvtier.connectors.sglang.shared.shards import device_shards, num_kv_heads, refuse_several
from kvtier.connectors.sglang.shared.tier_events import TIER_EVENTS
from kvtier.connectors.sglang.shared.unsupported import refuse
from kvtier.devices import find_device
from kvtier.layout import opaque
from kvtier.tiers import HostTier, StorageTier
from kvtier.tiers.remote.warm_start import warm_start_of

logger = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Longest wait for copies in flight when SGLang exits."""
MAX_DEPTHS = 1 << 16
"""Most pages whose position in the prompt is remembered until they are stored."""


@dataclass(slots=True)
class Offload:
    """Store of a node's pages to host memory, by pool. is_whole: whether every pool's began.

    audited: pages of the KV pool that are compared.
    """

    stores: list[tuple[PoolTiers, Store]] = field(default_factory=list)
    audited: Sequence[bytes] = ()
    is_whole: bool = False

    @property
    def done(self) -> bool:
        return all(store.done for _, store in self.stores)


class KvtierLinker(UnifiedCacheLinker):
    """SGLang's linker to kvtier's tiers.

    The constructor raises ``ConfigError``, with one sentence, for configurations that can't be
    served. The other methods never raise.
    """

    def __init__(
        self,
        server_args: object,
        params: Any,
        *,
        components: Collection[object],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Any = None,
    ) -> None:
        settings = LinkerSettings.read(extra_config or {}).titled(*served(server_args))
        config = RankConfig.of(params, server_args)
        refuse(config, server_args, settings)
        self._settings, self._config, self._options = settings, config, server_args
        pools = find_pools(params.token_to_kv_pool_allocator.get_kvcache(), params, components)
        self.forward_stream = forward_stream
        self._page_size = params.page_size
        self._names = PageNames(server_args, settings.namespace)
        self._names.settle_engine(config)
        self._engine = self._start_engine(pools)
        self._linked = self._link(pools)
        self.pools = {PoolName(name): linked.pool for name, linked in self._linked.items()}
        self._audits = LinkerAudits(
            settings.audit,
            self._linked[KV],
            self._device,
            self._page_size,
            lambda: self._names.digest,
        )
        self._loading = Loading(
            self._linked, self._page_size, self._after_forward, self._audits.pages.keyed
        )
        self.layer_done_counter = self._loading
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        caches = {name: linked.cache for name, linked in self._linked.items()}
        self._costs = caches[KV].costs
        block_bytes = sum(linked.copies.bytes_per_block for linked in self._linked.values())
        self._promotion = PromptPromotion(
            caches, self._page_size, block_bytes, settings.always_loads
        )
        self.gate = scheduler_hooks.QueueGate(self._promotion)
        self.asking = PromptReporter([*caches.values()], self._page_size)
        self._prompt = WaitingPrompt(0, 0)
        self._is_closed = False
        self._offloads: deque[Offload] = deque()
        self._depths: dict[bytes, int] = {}
        self._recording = Recording(settings, config, self._page_size, replica_of())
        self._hints = HintReader(settings, config, self._hint)
        WATCH.step_listeners.append(self._observe_prefill)
        NEW_WEIGHTS.listeners.append(self)
        tell_missing(WATCH.hooks(), prefill.LOSS)
        tell_missing(NEW_WEIGHTS.hooks(), new_weights.LOSS)
        tell_missing(scheduler_hooks.hooks(), scheduler_hooks.LOSS)

    def _start_engine(self, pools: Sequence[DevicePool]) -> TransferEngine:
        place = pools[0].buffers[0].rows.device
        name = place.type if place.index is None else f"{place.type}:{place.index}"
        self._device = find_device(name)
        self._device.prepare()
        engine = TransferEngine(self._device)
        engine.start()
        for finding in self._device.findings():
            logger.info("kvtier %s: %s %s", finding.topic, finding.found, finding.note)
        return engine

    def _link(self, pools: Sequence[DevicePool]) -> dict[str, PoolTiers]:
        """Return each pool with its tiers: host memory, a slab if configured, and stores.

        Raises:
            ConfigError: a capacity can't be allocated, or pages can't be cut into shards.
        """
        settings, config, options = self._settings, self._config, self._options
        page_bytes = {pool.name: pool.page_bytes for pool in pools}
        num_shards = settings.storage_shards
        if num_shards:
            refuse_several(list(page_bytes))

        def capacities(setting: str) -> Mapping[str, int]:
            return pool_capacities(setting, settings.size(setting), config, options, page_bytes)

        policy = policy_of(settings, options, scheduler_hooks.reporting_hooks())
        in_host = capacities("host_capacity")
        on_disk = capacities("disk_capacity") if settings.disk_path else {}
        in_stores = capacities("storage_capacity") if settings.locations else {}
        publishes = TIER_EVENTS.add(options, self._take_changes)
        linked = {}
        for pool in pools:
            group = opaque(slot_bytes(pool.page_bytes))
            # Pages of latents are equal on all ranks and have one name, so a store has them once.
            named = replace(config, is_mla_model=pool.has_latents)
            facts = pool_facts(named, pool.name, pool.source, pool.shapes)
            shards = None
            if num_shards:
                num_heads = num_kv_heads(options, pool.has_latents)
                shards = device_shards(num_shards, num_heads, config, pool, group.bytes_per_block)
            host = HostTier(group, in_host[pool.name], self._device)
            storages: list[StorageTier] = []
            if on_disk:
                folder = f"{folder_of(config, pool.name, replica_of())}-linked"
                if num_shards:  # the keys of its pages do not say which heads it has
                    folder += f"-{blake3(facts).hexdigest()[:16]}"
                slab = settings.disk_options(folder, on_disk[pool.name])
                storages.append(open_disk(slab, group, host.ready_memory))
            for location in settings.locations:
                capacity, memory = in_stores[pool.name], host.ready_memory
                storages.append(open_store(location, settings, group, capacity, memory, shards))
            if num_shards:
                facts = pool_facts(named, pool.name, pool.source, pool.shapes, any_size=True)
            cache = open_cache(
                host,
                storages,
                self._names.digest_of_part(facts),
                settings.bytes_per_day,
                settings.lookup_deadline_s,
                policy,
                pool_metrics(config, pool.name),
                tells_changes=publishes and pool.name == KV,
                warm=warm_start_of(settings.stores, settings.warm_start),
            )
            paged = pool.paged(group.bytes_per_block)
            copies = PoolCopies(cache, paged, pool.ends, host, self._engine)
            linked[pool.name] = PoolTiers(pool, cache, copies)
        return linked

    def _take_changes(self) -> Sequence[Change]:
        return self._linked[KV].cache.take_changes()

    def _hint(self, request: QueuedRequest) -> None:
        assert request.hint is not None
        keys = request.keys(self._page_size)
        for linked in self._linked.values():
            linked.cache.hint(keys, request.hint, self._page_size)

    # -- look-ups ----------------------------------------------------------------------------------

    def note_prompt(self, num_cached: int, num_tokens: int) -> None:
        """Note the prompt of the next look-up.

        num_cached: number of its first tokens that are on the device. num_tokens: its length.
        """
        self._prompt = WaitingPrompt(num_cached, num_tokens)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        try:
            return self._look_up(rid, transfers)
        except Exception:
            logger.exception("kvtier: a look-up failed, its prompt is computed rid=%s", rid)
            return []

    def _look_up(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        prompt, self._prompt = self._prompt, WaitingPrompt(0, 0)
        self._loading.look_up(prompt.num_cached)
        needs = _needs(transfers)
        if needs is None or needs.keys() != self._linked.keys():
            return []
        self._audits.pages.begin_look_up()
        theirs = next(pool.keys for pool in transfers if pool.name == PoolName.KV)
        keys = self._audits.pages.keyed(page_keys(theirs))
        for name, num_last in needs.items():
            if num_last:
                self._linked[name].cache.set_num_last(num_last)
        self.asking.look_up(keys)
        if not self._settings.mode.loads or self._audits.pages.is_closed:
            self._remember(keys, prompt.num_cached // self._page_size)
            return []
        found = {
            name: linked.cache.lookup(keys, has_gaps=name != KV)
            for name, linked in self._linked.items()
        }
        places = {name: lookup.states for name, lookup in found.items()}
        answers = [answer for lookup in found.values() for answer in lookup.answers]
        cuts = self._promotion.cuts(rid, prompt, keys, places, needs, answers)
        limit = self._audits.limit(rid, prompt.num_cached, keys, cuts[-1] if cuts else 0)
        cuts = [cut for cut in cuts if cut <= limit]
        num_there = cuts[-1] if cuts else 0
        self._remember(keys[num_there:], prompt.num_cached // self._page_size + num_there)
        self._loading.promise(keys[:num_there], places)
        return cuts

    def _remember(self, keys: Sequence[bytes], first: int) -> None:
        """Remember the position in the prompt of pages that will be computed."""
        if len(self._depths) + len(keys) > MAX_DEPTHS:
            self._depths.clear()
        self._depths.update(zip(keys, range(first, first + len(keys)), strict=True))

    # -- to the device -----------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load. The result depends on the transfers alone, since ranks must agree."""
        if not (wanted := _with_pages(transfers)):
            return False
        self._loading.queue(rid, wanted, self._promotion.waited_s(rid))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loading.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        return self._loading.begin()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loading.finish(counter_index)

    @contextmanager
    def _after_forward(self) -> Iterator[None]:
        """Submit copies in this context so that they start after the work queued on the forward.

        That work may read pages that the copies overwrite, or write pages that they read.
        """
        if self.forward_stream is None or self._device.name == "cpu":
            yield
            return
        with torch.get_device_module(self.forward_stream.device.type).stream(self.forward_stream):
            yield

    # -- from the device ---------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begin a store. The result depends on the transfers alone, since ranks must agree."""
        if not (wanted := _with_pages(transfers)):
            return False
        self._offloads.append(offload := Offload())
        if not self._settings.mode.stores or self._audits.pages.is_closed:
            return True  # it ends as one for whose pages there was no room
        try:
            with self._after_forward():
                depths: dict[bytes, int] = {}
                for transfer in wanted:
                    linked = self._linked[transfer.name.value]
                    keys = self._audits.pages.keyed(page_keys(transfer.keys))
                    audited = self._audits.pages.audited(keys) if linked.pool.name == KV else ()
                    offload.audited = offload.audited or audited
                    if not depths:
                        self.asking.store(keys, self._depths)
                        depths = dict(zip(keys, self._depths_of(keys), strict=True))
                    pages = linked.pool.pages(transfer.device_indices)
                    at = [depths[key] for key in keys]
                    store = linked.copies.store(keys, at, pages, audited)
                    offload.stores.append((linked, store))
            offload.is_whole = True
        except Exception:
            logger.exception("kvtier: pages could not be stored")
        return True

    def _depths_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of pages in the prompt.

        Generated pages come after the prompt's own.
        """
        depths: list[int] = []
        for key in keys:
            after = depths[-1] + 1 if depths else 0
            depths.append(self._depths.pop(key, after))
        return depths

    def num_completed_offloads(self) -> int:
        """Return how many of the first offloads are complete.

        They complete in order. SGLang calls this in each step.
        """
        for linked in self._linked.values():
            linked.cache.poll()
        num = 0
        while num < len(self._offloads) and self._offloads[num].done:
            num += 1
        return num

    def pop_completed_offload(self) -> bool:
        offload = self._offloads.popleft()
        stored = [linked.copies.end_store(store) for linked, store in offload.stores]
        for linked, store in offload.stores:
            if linked.pool.name == KV:
                self._audits.end(offload.audited, store)
        return offload.is_whole and all(stored)

    # -- upkeep ------------------------------------------------------------------------------------

    def _observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        if not self._loading.take_waits():  # else the step may have waited for layers
            self._costs.observe_prefill(num_before, num_tokens, seconds)

    def before_new_weights(self) -> None:
        """Forget the pages of the old weights, since SGLang's keys stay the same.

        The ends of copies in flight are still reported to SGLang, but their pages are not kept.
        """
        self._wait_for_copies()
        for offload in self._offloads:
            offload.is_whole = False
        self._loading.forget_promised()
        self._audits.pages.reset()
        for linked in self._linked.values():
            linked.cache.clear()
        self._names.forget()

    def after_new_weights(self) -> None:
        """Give pages names from now on that no other process uses."""
        self._names.disown("its weights were replaced in memory")

    def _wait_for_copies(self) -> None:
        """Wait for copies from and to the device."""
        stores = [store for offload in self._offloads for _, store in offload.stores]
        compared = [store.comparison.job for store in stores if store.comparison is not None]
        for job in (*self._loading.jobs(), *(store.job for store in stores), *compared):
            if job is not None:
                job.wait()

    def reset(self) -> None:
        """Forget the device's pages. Pages in the tiers below are kept."""
        self._wait_for_copies()
        self._loading.reset()
        while self._offloads:
            self.pop_completed_offload()
        self._promotion.forget()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.reset()
        WATCH.step_listeners.remove(self._observe_prefill)
        NEW_WEIGHTS.listeners.remove(self)
        TIER_EVENTS.remove(self._take_changes)
        self._recording.close()
        self._hints.close()
        self._names.close()
        is_over = self._engine.close(DRAIN_S) and self._audits.close(DRAIN_S)
        for linked in self._linked.values():
            is_over &= linked.cache.close()
        if is_over:
            self._device.close()


def _with_pages(transfers: Sequence[PoolTransfer]) -> list[PoolTransfer]:
    """Return the transfers that name pages and their places on the device."""
    return [pool for pool in transfers if pool.keys and pool.device_indices is not None]


def _needs(transfers: Sequence[PoolTransfer]) -> dict[str, int] | None:
    """Return, by pool, how many pages are needed before a cut; 0 for all of them.

    None for a look-up of an unknown kind.
    """
    needs: dict[str, int] = {}
    for transfer in transfers:
        if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
            needs[transfer.name.value] = max(1, len(transfer.keys or ()))
        elif transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
            needs[transfer.name.value] = 0
        else:
            return None
    return needs
