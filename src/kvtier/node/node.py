"""A node: the rooms of all models on a machine, in one host memory.

One thread owns it. It decides which room gets a segment of the memory: a free one if there is any,
else the one that was not used for longest, from a tenant above its floor. Segments below the floor
of a tenant are kept free for it.
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

from kvtier.config import parse_size
from kvtier.devices import Device
from kvtier.devices.base import Finding
from kvtier.errors import CacheError, ConfigError
from kvtier.layout import opaque
from kvtier.node.checksums import RecordWriter, Verifier
from kvtier.node.config import (
    DEFAULT_TENANT,
    NodeConfig,
    TenantQuota,
    check_quotas,
    check_tenant,
)
from kvtier.node.disk_space import DiskSpace
from kvtier.node.memory import NodeMemory
from kvtier.node.partition import Partition, PartitionOptions
from kvtier.node.partition_key import PartitionKey
from kvtier.node.pins import Pin
from kvtier.node.stores import room_location
from kvtier.tiers import StorageTier
from kvtier.tiers.codecs import check_coding
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.row import coded_locations, make_storage, refuse_lossy, storage_names
from kvtier.types import DISK, Direct

logger = logging.getLogger(__name__)

MARGIN_S = 1.0
"""A segment changes hands only if it was used so much earlier than the coldest one of the room that
asks. So rooms that are equally busy keep what they have."""
BALANCE_S = 0.1
"""Seconds between decisions on which segments change hands."""
MOST_RETIRING = 4
"""Segments of one tenant that may be on their way back at a time. A tenant whose blocks are in use
for long delays nobody but itself."""
MOST_ROOMS = 1024
MOST_ROOMS_OF_TENANT = 64
"""Each room costs threads, and memory for each slot that it could have."""
LINGER_S = 1.0
"""A room is polled so long after its last use, then only with all others."""
SWEEP_S = 5.0
"""Seconds between polls of all rooms."""
LEFT_S = 0.5
"""Seconds between looks at whether engines of an earlier node have ended."""


class CacheNode:
    """Rooms by identity, and the memory that they share.

    Args:
        config: its settings.
        device: prepares the memory.
        clock: seconds.

    Attributes:
        on_end: called, on any thread, when a transfer has ended; may be None.

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
        refuse_lossy(coded_locations(config.storage, config.coding))
        self.storage_names = storage_names(config.storage, bool(config.disk_path))
        self.memory = NodeMemory(
            config.directory, config.host_bytes, config.segment_bytes, device, config.disk_path
        )
        self._options = PartitionOptions(config.eviction_policy, config.lookup_deadline_s)
        self.quotas = dict(config.quotas)
        self.disk_space = DiskSpace(
            config.disk_path,
            parse_size(config.disk_capacity, "disk_capacity"),
            config.disk_bytes,
            lambda: self.quotas,
        )
        self._shrinking: set[str] = set()  # tenants above a ceiling that was lowered
        self._numbers: dict[PartitionKey, int] = {}
        self.rooms: list[Partition] = []
        self._wanting: dict[int, None] = {}  # rooms that asked for a segment in vain
        self._num_held: Counter[str] = Counter()  # by tenant: segments
        self._num_retiring: Counter[str] = Counter()  # by tenant: segments on their way back
        self._active: dict[int, float] = {}  # rooms that are polled, and until when
        self._next_balance_s = self._next_sweep_s = 0.0
        self.on_end: Callable[[], object] | None = None
        self.records = RecordWriter()
        self._verifier = Verifier(self._tell_of_ends)
        self._next_left_s = 0.0
        self._kept = self._keep()  # segments of rooms that were not opened yet

    def _keep(self) -> dict[PartitionKey, list[int]]:
        """Return the segments that an earlier node has left, by room."""
        records = self.memory.records
        kept: dict[PartitionKey, list[int]] = {}
        for name in records.rooms():
            key, segments = PartitionKey.of_folder(name), records.segments_of(name)
            if key is not None and segments:
                kept[key] = segments
                self._num_held[key.tenant] += len(segments)
        return kept

    # -- rooms -------------------------------------------------------------------------------------

    def check_key(self, key: PartitionKey, opening: Collection[PartitionKey] = ()) -> PartitionKey:
        """Return the key of a room that exists or may be made, with a tenant.

        opening: rooms that are being made. Raises ``ConfigError``.
        """
        if not key.tenant:
            key = replace(key, tenant=DEFAULT_TENANT)
        if key in self._numbers or key in opening:
            return key
        key.check()
        self.memory.check_block(key.block_bytes)
        others = [*self._numbers, *opening]
        num_own = sum(other.tenant == key.tenant for other in others)
        if len(others) >= MOST_ROOMS or num_own >= MOST_ROOMS_OF_TENANT:
            raise ConfigError(
                f"tenant {key.tenant!r} has {num_own} rooms, the node {len(others)}: no more than "
                f"{MOST_ROOMS_OF_TENANT} and {MOST_ROOMS} can be opened"
            )
        return key

    def number_of(self, key: PartitionKey) -> int | None:
        """Return the number of a room; None if it is not open."""
        return self._numbers.get(key)

    def room(self, key: PartitionKey) -> tuple[int, Partition]:
        """Return the number of a room, and the room; open it, and its storage, at its first use.

        Waits for storage; see ``RoomOpener``. Raises ``ConfigError`` if it can't be made.
        """
        key = self.check_key(key)
        number = self.number_of(key)
        return (
            self.enter(key, self.open_storages(key))
            if number is None
            else (number, self.rooms[number])
        )

    def enter(
        self, key: PartitionKey, storages: Mapping[str, StorageTier]
    ) -> tuple[int, Partition]:
        """Return the number of a new room, and the room. It takes over what is left of its memory.

        storages: its storage tiers. Raises ``ConfigError``.
        """
        number = len(self.rooms)
        room = Partition(
            key,
            self.memory,
            storages,
            self._options,
            partial(self._take_segment, number),
            self.records,
            self._clock,
        )
        room.tell_of_ends(self._tell_of_ends)
        self.rooms.append(room)
        self._numbers[key] = number
        logger.info("new room name=%s block_bytes=%d", key.name, key.block_bytes)
        segments = self._kept.pop(key, None)
        if segments:
            room.restore(segments, self.memory.records.users.left_mask, self._verifier)
        return number, room

    @property
    def kept_rooms(self) -> Sequence[PartitionKey]:
        """Rooms whose memory an earlier node has left, and that are not open yet."""
        return list(self._kept)

    @property
    def num_unverified(self) -> int:
        """Number of blocks of an earlier node that are yet to be verified."""
        return sum(room.kept.num_unverified for room in self.rooms)

    @property
    def num_aside(self) -> int:
        """Number of slots that engines of earlier nodes may use."""
        return sum(room.kept.num_aside for room in self.rooms)

    def keys_on_disk(self) -> list[PartitionKey]:
        """Return the rooms that have a slab, opened or not."""
        if not self.config.disk_path:
            return []
        try:
            folders = sorted(os.listdir(self.config.disk_path))
        except FileNotFoundError:  # no room was made yet
            return []
        return [key for key in map(PartitionKey.of_folder, folders) if key is not None]

    def room_of(self, number: int, tenant: str) -> Partition | None:
        """Return a room by its number, and poll it for a while; None if it is not the tenant's."""
        if not 0 <= number < len(self.rooms) or self.rooms[number].key.tenant != tenant:
            return None
        self.note_use(number)
        return self.rooms[number]

    def note_use(self, number: int) -> None:
        """Poll a room for a while."""
        self._active[number] = self._clock() + LINGER_S

    def _tell_of_ends(self) -> None:
        """Pass on that a transfer has ended. Called on any thread."""
        if self.on_end is not None:
            self.on_end()

    def open_storages(self, key: PartitionKey) -> dict[str, StorageTier]:
        """Open the storage tiers of a room, fastest first. A failure leaves nothing open.

        Any thread may call it.
        """
        config, group = self.config, opaque(key.block_bytes)
        made: list[StorageTier] = []
        with ExitStack() as undo:
            capacity = parse_size(config.storage_capacity, "storage_capacity")
            for location in coded_locations(config.storage, config.coding):
                store = make_storage(room_location(location, key.name), group, capacity, None)
                undo.callback(store.close)
                made.append(store)
            # Last: a new slab takes its whole space, also if a store refuses the room.
            if config.disk_path and (disk := self._disk(key)) is not None:
                made.insert(0, disk)
            undo.pop_all()
        return {each.name: each for each in made}

    def _disk(self, key: PartitionKey) -> DiskTier | None:
        """Open a room's slab. A disk that can't be read, or has no room, is left out."""
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
        """Whether a tenant has as much as it may have, with what it is to give back."""
        num = self._num_held[tenant] + self._num_retiring[tenant]
        return num >= self._num_ceiling(tenant)

    def _num_owed(self, but: str) -> int:
        """Return the number of free segments that are reserved for tenants other than ``but``."""
        others = (tenant for tenant in self.quotas if tenant != but)
        return sum(max(0, self._num_floor(name) - self._num_held[name]) for name in others)

    def _take_segment(self, number: int) -> int | None:
        """Return a free segment for a room; None if there is none, or its tenant may have none.

        Without one the room gets another room's segment later, if one is colder than its own.
        """
        room = self.rooms[number]
        tenant = room.key.tenant
        if not self._is_full(tenant) and self.memory.num_free > self._num_owed(tenant):
            segment = self.memory.take(room.tier)
            if segment is not None:
                self._num_held[tenant] += 1
            return segment
        self._wanting[number] = None
        return None

    def _rebalance(self) -> None:
        """Retire a cold segment for each room that asked for one in vain."""
        now_s = self._clock()
        if now_s < self._next_balance_s:
            return
        self._next_balance_s = now_s + BALANCE_S
        self._shrink()
        wanting, self._wanting = self._wanting, {}
        for number in wanting:
            self._retire_for(self.rooms[number])

    def _retire_for(self, room: Partition) -> None:
        """Retire the coldest segment of another room, if it is colder than all of this one's.

        A tenant below its floor gets one of another tenant's however warm it is, a tenant at its
        ceiling only one of its own.
        """
        tenant = room.key.tenant
        is_full = self._is_full(tenant)
        is_owed = self._num_held[tenant] < self._num_floor(tenant)
        others = (
            other
            for other in self.rooms
            if other is not room
            and self._may_lose(other, tenant)
            and (
                other.key.tenant != tenant if is_owed else not is_full or other.key.tenant == tenant
            )
        )
        coldest = _coldest(others)
        if coldest is None:
            return
        time_s, segment, other = coldest
        own = room.coldest_segment()
        if own is not None and time_s > own[0] - MARGIN_S and not is_owed:
            return
        self._retire(other, segment)

    def _retire(self, room: Partition, segment: int) -> None:
        """Begin to take a segment from a room."""
        room.retire(segment)
        self._num_held[room.key.tenant] -= 1
        self._num_retiring[room.key.tenant] += 1
        self._active[self._numbers[room.key]] = self._clock() + LINGER_S

    def _shrink(self) -> None:
        """Retire a segment of each tenant above its ceiling."""
        for tenant in list(self._shrinking):
            if self._num_held[tenant] <= self._num_ceiling(tenant):
                self._shrinking.remove(tenant)
                continue
            coldest = _coldest(room for room in self.rooms if room.key.tenant == tenant)
            if coldest is not None:
                self._retire(coldest[2], coldest[1])

    def _may_lose(self, room: Partition, wanting: str) -> bool:
        """Whether a segment may be taken from a room for the tenant ``wanting``."""
        tenant = room.key.tenant
        if self._num_retiring[tenant] >= MOST_RETIRING:
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
        for each in {room.key.tenant for room in self.rooms}:
            self._trim_pins(each)

    def pinnable_segments(self, tenant: str) -> int:
        """Return how many segments of a tenant may hold pinned blocks.

        They are its floor, or half of what no other tenant's floor reserves, and no more than its
        ceiling.
        """
        others = sum(self._num_floor(name) for name in self.quotas if name != tenant)
        half = max(0, self.memory.num_segments - others) // 2
        return min(max(self._num_floor(tenant), half), self._num_ceiling(tenant))

    def pin(self, room: Partition, keys: Sequence[bytes], seconds: float) -> Pin:
        """Keep the first blocks of a prompt in memory for a time, as far as its tenant may."""
        tenant = room.key.tenant
        elsewhere = self._num_pinned(tenant) - len(room.pins.segments)
        return room.pins.add(keys, seconds, self.pinnable_segments(tenant) - elsewhere)

    def _num_pinned(self, tenant: str) -> int:
        mine = (room for room in self.rooms if room.key.tenant == tenant)
        return sum(len(room.pins.segments) for room in mine)

    def _trim_pins(self, tenant: str) -> None:
        """End pins of a tenant until it has no more than it may."""
        for room in self.rooms:
            while (
                room.key.tenant == tenant
                and self._num_pinned(tenant) > self.pinnable_segments(tenant)
                and room.pins.remove_last()
            ):
                pass

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Notice transfers that have ended, and move segments.

        Costs nothing for rooms that were not used lately. Returns whether more is to do soon.
        """
        now_s = self._clock()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            self.poll_all()
        self._verifier.poll()
        self._poll_left(now_s)
        is_busy = False
        for number, until_s in list(self._active.items()):
            room = self.rooms[number]
            room.poll()
            if room.is_retiring:
                for segment in room.retire_further():
                    self._num_retiring[room.key.tenant] -= 1
                    self.memory.give_back(segment)
            is_busy |= room.is_busy
            if until_s <= now_s and not room.has_work:
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
                for room in self.rooms:
                    room.kept.let_go(user, users.left_mask)
                logger.info("engine of the node before has ended name=%s", user.name)

    def poll_all(self) -> None:
        """Let the next ``poll`` include every room."""
        self._active = dict.fromkeys(range(len(self.rooms)), 0.0) | self._active

    def check_invariants(self) -> None:
        """Raise AssertionError if rooms, segments and their counts don't agree."""
        seen: Counter[int] = Counter(self.memory.free_segments)
        for room in self.rooms:
            room.check_invariants()
            room.tier.check_invariants()
            seen.update(room.tier.segments)
            seen.update(room.tier.retired_segments)
        for segments in self._kept.values():
            seen.update(segments)
        assert sorted(seen.elements()) == list(range(self.memory.num_segments)), (
            "a segment is nobody's, or belongs to two"
        )
        for counts, kind in (self._num_held, "segments"), (self._num_retiring, "retired_segments"):
            found: Counter[str] = Counter()
            for room in self.rooms:
                found[room.key.tenant] += len(getattr(room.tier, kind))
            if kind == "segments":
                for key, segments in self._kept.items():
                    found[key.tenant] += len(segments)
            assert +found == +counts, f"{kind} are counted wrongly"

    def findings(self) -> Sequence[Finding]:
        """Return what is in use, for ``kvtier doctor``."""
        return self.memory.findings()

    def close(self) -> None:
        """Finish transfers, and release the memory."""
        is_over = [room.close() for room in self.rooms]
        self._verifier.close()
        self.records.close()
        if all(is_over):
            self.memory.close()


def _coldest(rooms: Iterable[Partition]) -> tuple[float, int, Partition] | None:
    """Return the time of the last use of the coldest segment of all rooms, it, and its room."""
    coldest: tuple[float, int, Partition] | None = None
    for room in rooms:
        found = room.coldest_segment()
        if found is not None and (coldest is None or found[0] < coldest[0]):
            coldest = (*found, room)
    return coldest
