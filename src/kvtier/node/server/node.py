"""A node: the partitions of all models on a machine, in one host memory.

One thread owns it. It decides which partition gets a segment of the memory: a free one if there is
any, else the one that was not used for longest, from a tenant above its floor. Segments below the
floor of a tenant are kept free for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from kvtier.core.config import parse_size
from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.types import DISK, HOST, Direct
from kvtier.devices import Device
from kvtier.layout import opaque
from kvtier.node.config import (
    DEFAULT_TENANT,
    NodeConfig,
    TenantQuota,
    check_quotas,
    check_tenant,
)
from kvtier.node.server.checksums import RecordWriter, Verifier
from kvtier.node.server.disk_space import DiskSpace
from kvtier.node.server.events import NodeEvents
from kvtier.node.server.memory import NodeMemory
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.pins import Pin
from kvtier.node.server.stores import partition_location
from kvtier.tiers import StorageTier
from kvtier.tiers.codecs import check_coding
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.row import check_stores, make_storage, refuse_lossy, storage_names, takes_writes

logger = logging.getLogger(__name__)

MARGIN_S = 1.0
"""A segment changes hands only if it was used so much earlier than the coldest one of the partition
that asks. So partitions that are equally busy keep what they have."""
BALANCE_S = 0.1
"""Seconds between decisions on which segments change hands."""
MAX_RETIRING = 4
"""Segments of one tenant that may be retiring at a time. A tenant whose blocks are in use for long
delays only itself."""
MAX_PARTITIONS = 1024
MAX_PARTITIONS_OF_TENANT = 64
"""Each partition costs threads, and memory for each slot that it could have."""
LINGER_S = 1.0
"""A partition is polled so long after its last use, then only with all others."""
SWEEP_S = 5.0
"""Seconds between polls of all partitions."""
LEFT_S = 0.5
"""Seconds between looks at whether engines of an earlier node have ended."""


class CacheNode:
    """Partitions by identity, and the memory that they share.

    Args:
        config: its settings.
        device: prepares the memory.
        clock: seconds.

    Attributes:
        on_end: called, on any thread, when a transfer has ended; may be None.
        events: publishes what the partitions hold; None if no router listens.

    Raises:
        ConfigError: the configuration is not possible.
    """

    def __init__(
        self, config: NodeConfig, device: Device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.instance = uuid4().hex
        self._clock = clock
        check_coding(config.coding)
        refuse_lossy(config.coding, config.stores)
        check_stores(config.stores)
        if not all(map(takes_writes, config.stores)):
            raise ConfigError(
                "storage: a pack file is of one model, and a node has rooms of several; import it "
                "into a store of the node, such as dir:///var/kv"
            )
        self.storage_names = storage_names(config.stores, bool(config.disk_path))
        self.memory = NodeMemory(
            config.directory, config.host_bytes, config.segment_bytes, device, config.disk_path
        )
        self.events = (
            NodeEvents(
                config.events,
                [HOST, *self.storage_names],
                {*config.quotas, *config.tenant_users},
            )
            if config.events
            else None
        )
        self.quotas = dict(config.quotas)
        self.disk_space = DiskSpace(
            config.disk_path,
            parse_size(config.disk_capacity, "disk_capacity"),
            config.disk_bytes,
            lambda: self.quotas,
        )
        self._shrinking: set[str] = set()  # tenants above a ceiling that was lowered
        self._numbers: dict[PartitionKey, int] = {}
        self.partitions: list[Partition] = []
        self._wanting: dict[int, None] = {}  # partitions that asked for a segment in vain
        self._num_held: Counter[str] = Counter()  # by tenant: segments
        self._num_retiring: Counter[str] = Counter()  # by tenant: segments on their way back
        self._active: dict[int, float] = {}  # partitions that are polled, and until when
        self._next_balance_s = self._next_sweep_s = 0.0
        self.on_end: Callable[[], object] | None = None
        self.records = RecordWriter()
        self._verifier = Verifier(self._tell_of_ends)
        self._next_left_s = 0.0
        self._kept = self._keep()  # segments of partitions that were not opened yet

    def _keep(self) -> dict[PartitionKey, list[int]]:
        """Return the segments left by the previous process, by partition."""
        records = self.memory.records
        kept: dict[PartitionKey, list[int]] = {}
        for name in records.partitions():
            key, segments = PartitionKey.of_folder(name), records.segments_of(name)
            if key is not None and segments:
                kept[key] = segments
                self._num_held[key.tenant] += len(segments)
        return kept

    # -- partitions --------------------------------------------------------------------------------

    def check_key(self, key: PartitionKey, opening: Collection[PartitionKey] = ()) -> PartitionKey:
        """Return the key of a partition that exists or may be made, with a tenant.

        opening: partitions that are being made. Raises ``ConfigError``.
        """
        if not key.tenant:
            key = replace(key, tenant=DEFAULT_TENANT)
        if key in self._numbers or key in opening:
            return key
        key.check()
        self.memory.check_block(key.block_bytes)
        others = [*self._numbers, *opening]
        num_own = sum(other.tenant == key.tenant for other in others)
        if len(others) >= MAX_PARTITIONS or num_own >= MAX_PARTITIONS_OF_TENANT:
            raise ConfigError(
                f"tenant {key.tenant!r} has {num_own} rooms, the node {len(others)}: no more than "
                f"{MAX_PARTITIONS_OF_TENANT} and {MAX_PARTITIONS} can be opened"
            )
        return key

    def number_of(self, key: PartitionKey) -> int | None:
        """Return the number of a partition; None if it is not open."""
        return self._numbers.get(key)

    def enter(
        self, key: PartitionKey, storages: Mapping[str, StorageTier]
    ) -> tuple[int, Partition]:
        """Return the number of a new partition, and it. It takes over what is left of its memory.

        storages: its storage tiers. Raises ``ConfigError``.
        """
        number = len(self.partitions)
        partition = Partition(
            key,
            self.memory,
            storages,
            self.config,
            partial(self._take_segment, number),
            self.records,
            self._clock,
            self._tell_of_ends,
        )
        self.partitions.append(partition)
        self._numbers[key] = number
        logger.info("new room name=%s block_bytes=%d", key.name, key.block_bytes)
        segments = self._kept.pop(key, None)
        if segments:
            partition.restore(segments, self.memory.records.users.left_mask, self._verifier)
        return number, partition

    @property
    def kept_partitions(self) -> Sequence[PartitionKey]:
        """Partitions left by the previous process that are not open yet."""
        return list(self._kept)

    @property
    def num_unverified(self) -> int:
        """Number of blocks of the previous process that are not verified yet."""
        return sum(partition.kept.num_unverified for partition in self.partitions)

    @property
    def num_aside(self) -> int:
        """Number of slots that engines of earlier nodes may use."""
        return sum(partition.kept.num_aside for partition in self.partitions)

    def keys_on_disk(self) -> list[PartitionKey]:
        """Return the partitions that have a slab, opened or not."""
        if not self.config.disk_path:
            return []
        try:
            folders = sorted(os.listdir(self.config.disk_path))
        except FileNotFoundError:  # no partition was made yet
            return []
        return [key for key in map(PartitionKey.of_folder, folders) if key is not None]

    def partition_of(self, number: int, tenant: str) -> Partition | None:
        """Return a partition, and poll it for a while; None if it is not the tenant's."""
        if not 0 <= number < len(self.partitions) or self.partitions[number].key.tenant != tenant:
            return None
        self.note_use(number)
        return self.partitions[number]

    def note_use(self, number: int) -> None:
        """Poll a partition for a while."""
        self._active[number] = self._clock() + LINGER_S

    def _tell_of_ends(self) -> None:
        """Pass on that a transfer has ended. Called on any thread."""
        if self.on_end is not None:
            self.on_end()

    def open_storages(self, key: PartitionKey) -> dict[str, StorageTier]:
        """Open the storage tiers of a partition, fastest first. A failure leaves nothing open.

        Any thread may call it.
        """
        config, group = self.config, opaque(key.block_bytes)
        made: list[StorageTier] = []
        with ExitStack() as undo:
            capacity = parse_size(config.storage_capacity, "storage_capacity")
            for location in config.stores:
                place = partition_location(location, key.name)
                store = make_storage(place, group, capacity, None, config.coding)
                undo.callback(store.close)
                made.append(store)
            # Last: a new slab takes its whole space, also if a store refuses the partition.
            if config.disk_path and (disk := self._disk(key)) is not None:
                made.insert(0, disk)
            undo.pop_all()
        return {each.name: each for each in made}

    def _disk(self, key: PartitionKey) -> DiskTier | None:
        """Open a partition's slab. A disk that can't be read, or has no room, is left out."""
        folder = Path(self.config.disk_path) / key.folder
        with self.disk_space.slab_of(key) as size:
            if not size:
                logger.warning("no disk space is left for room %s", key.name)
                return None
            key_source = self.config.encryption_key
            options = DiskOptions(folder, size, direct=Direct.OFF, encryption_key=key_source)
            try:
                return DiskTier(options, opaque(key.block_bytes), None, name=DISK)
            except CacheError as error:  # a damaged slab, or one of another key, too
                logger.error("a room is served without the disk: %s", error)
                return None

    # -- segments ----------------------------------------------------------------------------------

    def _num_floor(self, tenant: str) -> int:
        """Return the number of segments that are reserved for a tenant."""
        return self.quota(tenant).floor_segments(self.memory.segment_bytes)

    def _num_ceiling(self, tenant: str) -> int:
        """Return the most segments that a tenant may have."""
        most = self.quota(tenant).ceiling_segments(self.memory.segment_bytes)
        return self.memory.num_segments if most is None else most

    def _is_full(self, tenant: str) -> bool:
        """Whether a tenant has as many segments as it may have, including retiring ones."""
        num = self._num_held[tenant] + self._num_retiring[tenant]
        return num >= self._num_ceiling(tenant)

    def _num_owed(self, but: str) -> int:
        """Return the number of free segments that are reserved for tenants other than ``but``."""
        others = (tenant for tenant in self.quotas if tenant != but)
        return sum(max(0, self._num_floor(name) - self._num_held[name]) for name in others)

    def _take_segment(self, number: int) -> int | None:
        """Return a free segment for a partition. None if there is none, or the tenant is full.

        Without one the partition gets another one's segment later, if it is colder than its own.
        """
        partition = self.partitions[number]
        tenant = partition.key.tenant
        num_free = self.memory.num_free
        if num_free and not self._is_full(tenant) and num_free > self._num_owed(tenant):
            segment = self.memory.take(partition.tier)
            if segment is not None:
                self._num_held[tenant] += 1
            return segment
        self._wanting[number] = None
        return None

    def _rebalance(self) -> None:
        """Retire a cold segment for each partition whose request for one was not met."""
        now_s = self._clock()
        if now_s < self._next_balance_s:
            return
        self._next_balance_s = now_s + BALANCE_S
        self._shrink()
        wanting, self._wanting = self._wanting, {}
        for number in wanting:
            self._retire_for(self.partitions[number])

    def _retire_for(self, partition: Partition) -> None:
        """Retire the coldest segment of another partition, if it is colder than all of this one's.

        A tenant below its floor gets one of another tenant's however warm it is, a tenant at its
        ceiling only one of its own.
        """
        tenant = partition.key.tenant
        is_full = self._is_full(tenant)
        is_owed = self._num_held[tenant] < self._num_floor(tenant)
        others = (
            other
            for other in self.partitions
            if other is not partition
            and self._may_lose(other, tenant)
            and (
                other.key.tenant != tenant if is_owed else not is_full or other.key.tenant == tenant
            )
        )
        coldest = _coldest(others)
        if coldest is None:
            return
        time_s, segment, other = coldest
        own = partition.coldest_segment()
        if own is not None and time_s > own[0] - MARGIN_S and not is_owed:
            return
        self._retire(other, segment)

    def _retire(self, partition: Partition, segment: int) -> None:
        """Begin to take a segment from a partition."""
        partition.retire(segment)
        self._num_held[partition.key.tenant] -= 1
        self._num_retiring[partition.key.tenant] += 1
        self.note_use(self._numbers[partition.key])

    def _shrink(self) -> None:
        """Retire a segment of each tenant above its ceiling."""
        for tenant in list(self._shrinking):
            if self._num_held[tenant] <= self._num_ceiling(tenant):
                self._shrinking.remove(tenant)
                continue
            coldest = _coldest(
                partition for partition in self.partitions if partition.key.tenant == tenant
            )
            if coldest is not None:
                self._retire(coldest[2], coldest[1])

    def _may_lose(self, partition: Partition, wanting: str) -> bool:
        """Whether a segment may be taken from a partition for the tenant ``wanting``."""
        tenant = partition.key.tenant
        if self._num_retiring[tenant] >= MAX_RETIRING:
            return False
        return tenant == wanting or self._num_held[tenant] > self._num_floor(tenant)

    # -- quotas and pins ---------------------------------------------------------------------------

    def quota(self, tenant: str) -> TenantQuota:
        """Return the quota of a tenant."""
        return self.quotas.get(tenant, TenantQuota())

    def set_quota(self, tenant: str, quota: TenantQuota) -> None:
        """Change a tenant's quota. Memory that it requires changes hands little by little.

        Raises ``ConfigError`` if it can't be kept beside those of the other tenants.
        """
        check_tenant(tenant)
        quotas = {**self.quotas, tenant: quota}
        memory = self.memory
        check_quotas(quotas, memory.num_segments, memory.segment_bytes, self.config.disk_bytes)
        self.quotas = quotas
        self._shrinking.add(tenant)
        for each in {partition.key.tenant for partition in self.partitions}:
            self._trim_pins(each)

    def pinnable_segments(self, tenant: str) -> int:
        """Return how many segments of a tenant may hold pinned blocks.

        They are its floor, or half of what no other tenant's floor reserves, and no more than its
        ceiling.
        """
        others = sum(self._num_floor(name) for name in self.quotas if name != tenant)
        half = max(0, self.memory.num_segments - others) // 2
        return min(max(self._num_floor(tenant), half), self._num_ceiling(tenant))

    def pin(self, partition: Partition, keys: Sequence[bytes], seconds: float) -> Pin:
        """Keep the first blocks of a prompt in memory for a time, as far as its tenant may."""
        tenant = partition.key.tenant
        elsewhere = self._num_pinned(tenant) - len(partition.pins.segments)
        return partition.pins.add(keys, seconds, self.pinnable_segments(tenant) - elsewhere)

    def _num_pinned(self, tenant: str) -> int:
        mine = (partition for partition in self.partitions if partition.key.tenant == tenant)
        return sum(len(partition.pins.segments) for partition in mine)

    def _trim_pins(self, tenant: str) -> None:
        """End pins of a tenant until it has no more than it may."""
        for partition in self.partitions:
            while (
                partition.key.tenant == tenant
                and self._num_pinned(tenant) > self.pinnable_segments(tenant)
                and partition.pins.remove_last()
            ):
                pass

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Notice transfers that have ended, and move segments.

        Costs nothing for partitions that were not used lately. Returns whether more is to do soon.
        """
        now_s = self._clock()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            self.poll_all()
        self._verifier.poll()
        self._poll_left(now_s)
        is_busy = False
        for number, until_s in list(self._active.items()):
            partition = self.partitions[number]
            partition.poll()
            for segment in partition.retire_further():
                self._num_retiring[partition.key.tenant] -= 1
                self.memory.give_back(segment)
            is_busy |= partition.is_busy
            if until_s <= now_s and not partition.has_work:
                del self._active[number]
        if self._wanting or self._shrinking:
            self._rebalance()
        return is_busy

    def _poll_left(self, now_s: float) -> None:
        """Notice engines of earlier nodes that use no slot any more."""
        users = self.memory.records.users
        if users.left and now_s >= self._next_left_s:
            self._next_left_s = now_s + LEFT_S
            for user in users.take_ended():
                for partition in self.partitions:
                    partition.kept.release(user, users.left_mask)
                logger.info("engine of the node before has ended name=%s", user.name)

    def poll_all(self) -> None:
        """Let the next ``poll`` include every partition."""
        self._active = dict.fromkeys(range(len(self.partitions)), 0.0) | self._active

    def check_invariants(self) -> None:
        """Raise AssertionError if partitions, segments and their counts don't agree."""
        seen: Counter[int] = Counter(self.memory.free_segments)
        for partition in self.partitions:
            partition.check_invariants()
            partition.tier.check_invariants()
            seen.update(partition.tier.segments)
            seen.update(partition.tier.retired_segments)
        for segments in self._kept.values():
            seen.update(segments)
        assert sorted(seen.elements()) == list(range(self.memory.num_segments)), (
            "a segment is nobody's, or belongs to two"
        )
        for counts, kind in (self._num_held, "segments"), (self._num_retiring, "retired_segments"):
            found: Counter[str] = Counter()
            for partition in self.partitions:
                found[partition.key.tenant] += len(getattr(partition.tier, kind))
            if kind == "segments":
                for key, segments in self._kept.items():
                    found[key.tenant] += len(segments)
            assert +found == +counts, f"{kind} are counted wrongly"

    def close(self) -> None:
        """Finish transfers, and release the memory."""
        is_over = [partition.close() for partition in self.partitions]
        if self.events is not None:
            self.events.close()
        self._verifier.close()
        self.records.close()
        if all(is_over):
            self.memory.close()


def _coldest(partitions: Iterable[Partition]) -> tuple[float, int, Partition] | None:
    """Return the coldest segment: the time of its last use, its number, and its partition."""
    coldest: tuple[float, int, Partition] | None = None
    for partition in partitions:
        found = partition.coldest_segment()
        if found is not None and (coldest is None or found[0] < coldest[0]):
            coldest = (*found, partition)
    return coldest
