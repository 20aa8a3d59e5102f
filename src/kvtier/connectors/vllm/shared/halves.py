"""Both halves of kvtier under vLLM, made from the settings and the facts of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import vllm
from vllm import envs
from vllm.platforms import current_platform

from kvtier.cache.transfer.ranks import RankMover
from kvtier.connectors.vllm.shared import new_weights, weights
from kvtier.connectors.vllm.shared.adapters import Adapters, adapters_of
from kvtier.connectors.vllm.shared.cores import off_compute_cores
from kvtier.connectors.vllm.shared.descriptions import NodeDescriber
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.names import EngineFacts, VllmNames, rank_layout
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.connectors.vllm.shared.reach import Cuts
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.connectors.vllm.shared.tiers import EngineTiers, node_tiers, rank_tiers
from kvtier.connectors.vllm.shared.worker import RankLimits, TierWorker
from kvtier.core.errors import ConfigError
from kvtier.core.system.memory import total_bytes
from kvtier.core.types import DEVICE, DISK, HOST, ClientHints, Direct, LoadPolicy
from kvtier.devices import find_device
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.observe.logs import log_in_engine
from kvtier.tiers import StorageFacts
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.remote.warm_start import warm_start_of
from kvtier.tiers.row import split_storage, storage_names, takes_writes
from kvtier.tiers.wrappers import Shards

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Manager = TypeVar("Manager", bound=TierManager)
Worker = TypeVar("Worker", bound=TierWorker)

SLOT_ALIGNMENT = 4096
"""Slots begin on sectors, so that each can be read from a disk in place."""
LAYOUT_DIGITS = 16
"""Digits of a digest in a folder's name."""
SHARED_MEMORY = Path("/dev/shm")


class Sizes:
    """Sizes and options of one engine's tiers, from which each process makes its half.

    Raises ``ConfigError``. extra: of ``kv_connector_extra_config``.
    """

    def __init__(self, facts: EngineFacts, extra: Mapping[str, object]) -> None:
        log_in_engine(logging.getLogger("vllm"))
        self.settings = VllmSettings.read(extra)
        self.facts = facts = replace(facts, any_size=self.settings.storage_shards > 0)
        num_bytes = facts.bytes_per_page * facts.pages_per_block
        self.slot_bytes = -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        engine = f"vllm {vllm.__version__}"
        if self.settings.grid:  # another cut of prompts: KV with other bits
            engine += f" grid {self.settings.grid}"
        self.names = VllmNames(facts, self.slot_bytes, engine, self.settings.namespace)
        host_bytes = 0 if self.settings.node else self.settings.host_bytes
        self.num_slots = self._num_slots_in("host_capacity", host_bytes)
        total, limited_by = total_bytes()  # before tables of that many slots are made
        if self.num_slots * self.slot_bytes > total:
            raise self.settings.wrong(
                f"host_capacity: {self.settings.host_capacity!r} is more than the "
                f"{total / 2**30:.1f} GiB that are there ({limited_by}); lower it"
            )
        self.num_disk_slots = self._num_slots_in("disk_capacity", self.settings.disk_bytes)
        store_bytes = self.settings.store_bytes if self.settings.stores else 0
        self.num_store_slots = self._num_slots_in("storage_capacity", store_bytes)
        self.direct = self._find_direct()

    def _num_slots_in(self, name: str, num_bytes: int) -> int:
        """Slots of each shard in ``num_bytes`` of all of them."""
        num_slots = num_bytes // self.facts.num_shards // self.slot_bytes if self.slot_bytes else 0
        if num_bytes and self.slot_bytes and num_slots < 1:
            raise ConfigError(
                f"{name}: {num_bytes} bytes are below one block of {self.slot_bytes} bytes on each "
                f"of {self.facts.num_shards} ranks; raise it"
            )
        return num_slots

    def _find_direct(self) -> Direct:
        """Return whether blocks may go directly from disk to vLLM's memory, before a rank looks."""
        reason = ""
        if not self.num_disk_slots:
            reason = "there is no disk_path"
        elif self.facts.num_shards < self.facts.num_ranks:
            reason = "one rank has the disk, and all load what it brings to host memory"
        direct = Direct(self.settings.disk_direct)
        if direct is Direct.ON and reason:
            raise self.settings.wrong(f"disk_direct is on, and {reason}; leave it off")
        return Direct.OFF if reason else direct

    # -- in the scheduler's process ----------------------------------------------------------------

    def make_manager(self, kind: type[Manager]) -> Manager:
        """Return the scheduler's half."""
        facts, settings = self.facts, self.settings
        tokens = tuple(group.tokens_per_page * facts.pages_per_block for group in facts.groups)
        shape = Shape(tokens, self.slot_bytes, facts.num_shards)
        mover = self._make_mover()
        return kind(
            self._make_tiers(mover, shape),
            mover,
            self.names,
            shape,
            LoadPolicy(settings.load_policy),
            facts.publishes_events,
            settings.client_hints != ClientHints.OFF,
            settings.mode,
            settings.audit,
            # On other devices vLLM knows the variable, and promises nothing.
            getattr(envs, "VLLM_BATCH_INVARIANT", False) and current_platform.is_cuda(),
        )

    def _make_mover(self) -> RankMover:
        facts = self.facts
        disk = replace(DiskTier.facts, direct=self.direct)
        stores = {
            split_storage(store)[0]: StorageFacts(is_shared=True, takes_writes=takes_writes(store))
            for store in self.settings.stores
        }
        return RankMover(
            {name: disk if name == DISK else stores[name] for name in self._storage_names},
            self.slot_bytes,
            facts.num_ranks,
            facts.num_shards,
            self.settings.lookup_deadline_s,
            device=DEVICE,
        )

    @property
    def _storage_names(self) -> list[str]:
        return storage_names(self.settings.stores, bool(self.num_disk_slots))

    def _make_tiers(self, mover: RankMover, shape: Shape) -> EngineTiers:
        settings = self.settings
        if (client := self._node()) is not None:
            return node_tiers(client, self.names, shape, settings.node_deadline_s)
        num_slots = dict.fromkeys(self._storage_names, self.num_store_slots)
        num_slots |= {HOST: self.num_slots, DISK: self.num_disk_slots}
        return rank_tiers(
            mover,
            num_slots,
            self.names,
            shape,
            settings.bytes_per_day // self.facts.num_shards,
            settings.lookup_deadline_s,
            settings.eviction_policy,
        )

    def _node(self) -> NodeClient | None:
        """Return a client of the node that has the tiers; None if this engine has its own."""
        settings = self.settings
        if not settings.node:
            return None
        return NodeClient(
            Path(settings.node),
            settings.node_tenant,
            self.facts.engine_id,
            settings.titled(self.facts.model).engine_name,
        )

    # -- in a rank ---------------------------------------------------------------------------------

    def make_worker(
        self,
        kind: Callable[..., Worker],
        pages: object,
        device: str,
        shards: Shards | None = None,
    ) -> Worker:
        """Return a rank's half, made as ``TierWorker`` is, for a device of this name.

        shards: of blocks in stores, if these do not depend on the ranks.
        """
        facts, settings = self.facts, self.settings
        assert facts.any_size == (shards is not None), "shards are needed to store blocks in them"
        if shards is None and facts.num_shards > 1:
            shards = Shards.whole(f"{facts.rank}/{facts.num_shards}", self.slot_bytes)
        stores = settings.stores if facts.rank < facts.num_shards else []
        limits = RankLimits(
            self.slot_bytes,
            self.num_slots,
            self._disk_options(),
            settings.bytes_per_s // facts.num_shards,
            # The ranks share host memory where one of them stores for all.
            SHARED_MEMORY / f"kvtier-{facts.engine_id}" if facts.is_replicated else None,
            stores,
            self.num_store_slots * self.slot_bytes,
            facts.num_shards,
            self._node(),
            shards,
            settings.coding,
            warm_start_of(stores, settings.warm_start) if stores else None,
        )
        with off_compute_cores():
            return kind(pages, find_device(device), limits, facts.pages_per_block, facts.rank)

    def _disk_options(self) -> DiskOptions | None:
        """Return the options of this rank's slab."""
        facts = self.facts
        if not self.num_disk_slots or facts.rank >= facts.num_shards:
            return None
        num_bytes = self.num_disk_slots * self.slot_bytes
        options = self.settings.disk_options(
            self._folder(), num_bytes, rank=facts.rank, num_ranks=facts.num_shards
        )
        return replace(options, direct=self.direct)

    def _folder(self) -> str:
        """Return the name of this rank's folder, distinct for each data-parallel replica.

        It does not depend on the number of replicas, which vLLM gives as 1 for dense models.
        """
        facts = self.facts
        folder = f"replica{facts.replica}-" * bool(facts.replica) + f"rank{facts.rank}"
        if facts.any_size:  # the keys of its blocks do not say which part of them it has
            folder += f"-{rank_layout(facts, self.slot_bytes)[:LAYOUT_DIGITS]}"
        return folder


def begin_serving(
    connector: new_weights.Connector,
    manager: TierManager,
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> Adapters:
    """Identify the weights, and have ``connector`` learn of new ones. Return the adapters."""
    if manager.has_storage:
        with off_compute_cores():
            weights.settle(manager.names, config)
    groups = kv_cache_config.kv_cache_groups
    manager.cuts = Cuts.of(manager.names.facts, groups)
    if isinstance(manager.cache, NodeCache):
        specs = [group.kv_cache_spec for group in groups]
        manager.describer = NodeDescriber(manager.cache, manager.names.facts, config, specs)
    new_weights.watch(connector)
    return adapters_of(config, manager.has_storage, manager.audits.renamed)
