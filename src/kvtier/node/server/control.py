"""Control of a running node: its state, and changes that a person or a router requests.

A partition is called a room here, as in the API, the CLI and the metrics. Rooms are named by
``PartitionKey.name``, and prompts by the keys that engines give their blocks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from math import inf
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kvtier import __version__
from kvtier.cache.local import LocatedBlocks
from kvtier.control.contract import (
    CacheControl,
    ControlError,
    Deleted,
    HintedPrompt,
    PinnedBlocks,
    PromptName,
    PromptPlaces,
    check_pin,
    check_wait,
)
from kvtier.core.hints import Hint
from kvtier.core.keys import TOKEN_DTYPE, PackedKeys
from kvtier.core.types import DEVICE, HOST, BlockId, Match
from kvtier.node.config import DEFAULT_TENANT, TenantQuota, change_bounds, check_tenant
from kvtier.node.server.connection import bring
from kvtier.node.server.deleting import PartitionDeletion, delete_blocks, delete_partition
from kvtier.node.server.lookups import TimeCounts
from kvtier.node.server.partition import Partition
from kvtier.node.server.registry import Registry
from kvtier.node.wire.protocol import MAX_KEYS, CostsNotice
from kvtier.plan import Costs, PrefillCost, PromptCost, Route, ways_of, weigh

Given = ParamSpec("Given")
Result = TypeVar("Result")
BoundTexts = tuple[str | None, str | None]
MAX_PROMPT_TOKENS = 1 << 20
"""Longest prompt whose cost is estimated."""
HEXADECIMAL = re.compile("[0-9a-fA-F]*")


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of an attached engine.

    title: its name for display, with model and port; "" if it has none. slots: number of slots that
    it reads or writes. waiting: its requests that wait for storage or for another engine. failures,
    pauses: its calls without an answer in time, and how often its breaker opened after them, as it
    has reported by now.
    """

    name: str
    tenant: str
    pids: Sequence[int]
    slots: int
    waiting: int
    failures: int
    pauses: int
    title: str = ""


@dataclass(frozen=True, slots=True)
class RoomState:
    """State of a partition.

    Attributes:
        is_open: False for a partition that only the disk has, since no engine has opened it yet.
        used_bytes: by tier, of the blocks that the index knows.
        capacity_bytes: by storage tier.
        looked_up: blocks by the place where engines found them.
        breakers: state of the breaker by storage tier.
        errors: last error by storage tier.
    """

    name: str
    tenant: str
    scope: str
    block_bytes: int
    key_bytes: int
    is_open: bool
    segments: int = 0
    pinned_segments: int = 0
    pinned_blocks: int = 0
    used_bytes: Mapping[str, int] | None = None
    capacity_bytes: Mapping[str, int] | None = None
    looked_up: Mapping[str, int] | None = None
    breakers: Mapping[str, str] | None = None
    errors: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TenantState:
    """Use of memory and disk by one tenant.

    pinnable_segments: how many may hold pinned blocks. slab_bytes: of its slabs, used or not.
    """

    floor_bytes: int
    ceiling_bytes: int | None
    segments: int
    pinned_segments: int
    pinnable_segments: int
    used_bytes: Mapping[str, int]
    disk_floor_bytes: int = 0
    disk_ceiling_bytes: int | None = None
    slab_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of a node.

    Attributes:
        free_segments: segments that belong to no partition, and whose pages are ready.
        unverified_blocks: blocks of the previous process that are not verified yet.
        slots_aside: slots that engines of the previous process may use.
    """

    version: str
    instance: str
    uptime_s: float
    memory_bytes: int
    segment_bytes: int
    segments: int
    free_segments: int
    engines: Sequence[EngineState]
    tenants: Mapping[str, TenantState]
    rooms: Sequence[RoomState]
    unverified_blocks: int = 0
    slots_aside: int = 0


def on_loop(
    method: Callable[Concatenate[NodeControl, Given], Coroutine[object, object, Result]],
) -> Callable[Concatenate[NodeControl, Given], Coroutine[object, object, Result]]:
    """Let a method run on the node's event loop, whose thread owns the node.

    It is awaited in the loop of the control's HTTP server, on another thread.
    """

    async def called(control: NodeControl, /, *given: Given.args, **more: Given.kwargs) -> Result:
        running = method(control, *given, **more)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, control.loop))

    update_wrapper(called, method)
    return called


class NodeControl(CacheControl):
    """Queries and changes of one node. Create it in the node's event loop.

    loop: the node's event loop.
    """

    def __init__(self, registry: Registry) -> None:
        self.loop = asyncio.get_running_loop()
        self._registry = registry
        self._node = registry.node
        self._began_s = time.monotonic()

    # -- state -------------------------------------------------------------------------------------

    @on_loop
    async def status(self) -> NodeState:
        """Return the state of the node, its engines, tenants and partitions."""
        node = self._node
        memory = node.memory
        return NodeState(
            version=__version__,
            instance=node.instance,
            uptime_s=round(time.monotonic() - self._began_s, 1),
            memory_bytes=memory.num_bytes,
            segment_bytes=memory.segment_bytes,
            segments=memory.num_segments,
            free_segments=memory.num_free,
            engines=[
                EngineState(
                    engine.name,
                    engine.tenant or DEFAULT_TENANT,
                    sorted({client.process.pid for client in engine.clients.values()}),
                    engine.num_slots,
                    engine.num_waiting,
                    engine.num_failures,
                    engine.num_pauses,
                    engine.title,
                )
                for engine in self._registry.engines.values()
            ],
            tenants=self._tenants(),
            rooms=[*map(_open_partition, node.partitions), *self._closed_partitions()],
            unverified_blocks=node.num_unverified,
            slots_aside=node.num_aside,
        )

    def _tenants(self) -> dict[str, TenantState]:
        node = self._node
        names = {*node.quotas, *(partition.key.tenant for partition in node.partitions)}
        return {name: self._tenant(name) for name in sorted(names)}

    def _tenant(self, name: str) -> TenantState:
        node = self._node
        partitions = [partition for partition in node.partitions if partition.key.tenant == name]
        used: Counter[str] = Counter()
        for partition in partitions:
            used.update(partition.used_bytes_by_tier())
        quota = node.quota(name)
        return TenantState(
            floor_bytes=quota.host_floor,
            ceiling_bytes=quota.host_ceiling,
            segments=sum(len(partition.tier.segments) for partition in partitions),
            pinned_segments=sum(len(partition.pins.segments) for partition in partitions),
            pinnable_segments=node.pinnable_segments(name),
            used_bytes=dict(used),
            disk_floor_bytes=quota.disk_floor,
            disk_ceiling_bytes=quota.disk_ceiling,
            slab_bytes=node.disk_space.held_by(name),
        )

    def _closed_partitions(self) -> list[RoomState]:
        is_open = {partition.key for partition in self._node.partitions}
        return [
            RoomState(
                key.name, key.tenant, key.scope.hex(), key.block_bytes, key.key_bytes, is_open=False
            )
            for key in self._node.keys_on_disk()
            if key not in is_open
        ]

    @on_loop
    async def lookup_times(self) -> TimeCounts:
        """Return the times of look-ups by engines."""
        return self._registry.lookups.copy()

    # -- prompts -----------------------------------------------------------------------------------

    @on_loop
    async def lookup(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        """Find the blocks of a prompt, and wait for the answers of stores."""
        found, wanted = await self._blocks(prompt)
        until_s = time.monotonic() + check_wait(timeout_s)
        self._registry.wake_all()
        while True:
            blocks, pending = found.lookup(wanted)
            if all(each.is_over for each in pending) or not await self._registry.wait(until_s):
                return _found(found, blocks)

    @on_loop
    async def prefetch(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        """Read the blocks of a prompt from storage into memory. Return where they are then."""
        found, wanted = await self._blocks(prompt)
        return _found(found, await self._bring(found, wanted, timeout_s))

    async def _bring(
        self, partition: Partition, keys: Sequence[bytes], timeout_s: float
    ) -> LocatedBlocks:
        until_s = time.monotonic() + check_wait(timeout_s)
        self._registry.wake_all()
        return await bring(partition, keys, self._registry, until_s)

    @on_loop
    async def pin(self, prompt: PromptName, seconds: float, timeout_s: float) -> PinnedBlocks:
        """Read the blocks of a prompt into memory, and keep the first ones there for a time."""
        check_pin(seconds)
        found, wanted = await self._blocks(prompt)
        await self._bring(found, wanted, timeout_s)
        pin = self._node.pin(found, wanted, seconds)
        num = len(pin.segment_of)
        return PinnedBlocks(found.key.name, pin.number if num else 0, len(wanted), num)

    @on_loop
    async def hint(self, prompt: PromptName, hint: Hint) -> HintedPrompt:
        """Apply a hint to the blocks of a prompt; it counts tokens in blocks."""
        found, wanted = await self._blocks(prompt)
        self._registry.wake_all()
        results = []
        for stated in hint.block_hint(1, found.clock()):
            results.append(found.cache.apply_hint(wanted, stated).as_json())
            await asyncio.sleep(0)
        return HintedPrompt(found.key.name, len(wanted), results)

    @on_loop
    async def unpin(self, room: str, number: int) -> None:
        """End a pin before its time."""
        found = await self._partition(room)
        if not found.pins.remove(number):
            raise ControlError(f"room {found.key.name} has no pin {number}", is_unknown=True)

    # -- costs -------------------------------------------------------------------------------------

    async def cost(self, prompt: PromptName) -> dict[str, PromptCost]:
        """Return what a prompt would cost each engine of its partition, by the engine's name.

        Nothing is looked up in storage, and nothing is changed.
        """
        events, tokens = self._node.events, prompt.prompt
        if events is None:
            raise ControlError("the node knows no tokens of prompts; start it with --events")
        if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_PROMPT_TOKENS:
            raise ControlError(f"give prompt as 1 to {MAX_PROMPT_TOKENS} token ids")
        try:
            packed = np.asarray(tokens, TOKEN_DTYPE).tobytes()
        except OverflowError:
            raise ControlError("a token id is below 0, or above 32 bits") from None
        number, partition = await self._numbered(prompt.room)
        found = events.find(number, partition, packed, prompt.tenant)
        if found is None:
            raise ControlError(
                f"room {partition.key.name} is published at no address of --events so far, or its "
                "model has several KV groups"
            )
        size, keys = found
        tiers, unknown_in, by_engine = await self._measured(number, partition, keys)
        match = Match(
            list(map(BlockId, range(len(tiers)))), tiers, (False,) * len(tiers), len(keys)
        )
        return {
            name: PromptCost.of(
                weigh(
                    match,
                    costs,
                    num_tokens=len(tokens),
                    block_size=size or 1,
                    bytes_per_block=partition.key.block_bytes,
                    num_free_slots=len(tiers),
                ),
                unknown_in=unknown_in,
            )
            for name, costs in by_engine.items()
        }

    @on_loop
    async def _numbered(self, room: str) -> tuple[int, Partition]:
        found = await self._partition(room)
        return self._node.partitions.index(found), found

    @on_loop
    async def _measured(
        self, number: int, partition: Partition, keys: Sequence[bytes]
    ) -> tuple[tuple[str, ...], Sequence[str], dict[str, Costs]]:
        """Return the tier of each of a prompt's first blocks, and what engines have measured.

        Also return the storage tiers that may have more of the prompt.
        """
        located = partition.locate(keys) if keys else None
        num, names = 0, (HOST, *partition.cache.storages)
        if located is not None:
            num = PromptPlaces.of("", [at.name.lower() for at in located.block_states]).found
        sources = () if located is None else located.sources[:num].tolist()
        costs = {
            engine.name: _costs(engine.costs[number], partition)
            for engine in self._registry.engines.values()
            if number in engine.costs
        }
        return tuple(names[at] for at in sources), partition.cache.ladder.unindexed(), costs

    # -- deletion ----------------------------------------------------------------------------------

    @on_loop
    async def delete(self, prompt: PromptName, timeout_s: float) -> Deleted:
        """Delete the blocks of a prompt from every tier."""
        found, wanted = await self._blocks(prompt)
        until_s = time.monotonic() + check_wait(timeout_s)
        self._registry.wake_all()
        left = await delete_blocks(found, wanted, self._registry.wait, until_s)
        problems = []
        if left:
            errors = [f"{name}: {why}" for name, why in found.storage_errors().items()]
            problems.append(f"{len(left)} blocks: storage has not confirmed it; {errors}")
        return Deleted(not left, [found.key.name], len(wanted), problems)

    @on_loop
    async def delete_rooms(self, room: str, tenant: str, timeout_s: float) -> Deleted:
        """Delete all blocks of one partition, or of all partitions of a tenant, from every tier."""
        if bool(room) == bool(tenant):
            raise ControlError("name a room or a tenant, and not both")
        if room:
            return await self._delete({room}, timeout_s)
        check_tenant(tenant)
        names = {name for name, each in self._partition_tenants().items() if each == tenant}
        if not names:
            raise ControlError(f"tenant {tenant!r} has no room here", is_unknown=True)
        return await self._delete(names, timeout_s)

    @on_loop
    async def clear(self, room: str, memory_only: bool, timeout_s: float) -> Deleted:
        """Delete all blocks of one or all partitions, or only evict them from memory."""
        names = {room} if room else set(self._partition_tenants())
        if not memory_only:
            return await self._delete(names, timeout_s)
        partitions = [
            partition for partition in self._node.partitions if partition.key.name in names
        ]
        if room and not partitions:
            raise ControlError(f"no room is called {room!r}", is_unknown=True)
        for partition in partitions:
            for _ in partition.evict_all():
                await asyncio.sleep(0)
        return Deleted(True, [partition.key.name for partition in partitions], None, [])

    def _partition_tenants(self) -> dict[str, str]:
        """Return the tenant of each partition by its name."""
        keys = {*(partition.key for partition in self._node.partitions), *self._node.keys_on_disk()}
        return {key.name: key.tenant for key in keys}

    async def _delete(self, names: set[str], timeout_s: float) -> Deleted:
        until_s = time.monotonic() + check_wait(timeout_s)
        locations = self._node.config.stores
        done: list[PartitionDeletion] = []
        for name in sorted(names):
            partition = await self._registry.opener.named(name)
            if partition is None and not locations:
                raise ControlError(f"no room is called {name!r}", is_unknown=True)
            self._registry.wake_all()
            done.append(
                await delete_partition(name, partition, locations, self._registry.wait, until_s)
            )
        problems = [f"{each.name}: {problem}" for each in done for problem in each.problems]
        return Deleted(not problems, [each.name for each in done], None, problems)

    # -- quotas ------------------------------------------------------------------------------------

    @on_loop
    async def tenants(self) -> dict[str, TenantState]:
        """Return quota and use of each tenant."""
        return self._tenants()

    @on_loop
    async def set_quota(self, tenant: str, host: BoundTexts, disk: BoundTexts) -> TenantState:
        """Change the quota of a tenant.

        host, disk: floor and ceiling, as ``change_bounds`` has them.
        """
        quota = self._node.quota(tenant)
        quota = TenantQuota(
            *change_bounds((quota.host_floor, quota.host_ceiling), *host),
            *change_bounds((quota.disk_floor, quota.disk_ceiling), *disk),
        )
        self._node.set_quota(tenant, quota)
        self._registry.wake_all()
        return self._tenant(tenant)

    # -- names -------------------------------------------------------------------------------------

    async def _blocks(self, prompt: PromptName) -> tuple[Partition, list[bytes]]:
        """Return the partition of a prompt, and its keys, each once.

        Raises ``ControlError`` if the prompt is named otherwise.
        """
        partition = await self._partition(prompt.room)
        if prompt.keys is None:
            raise ControlError("a node knows prompts by the keys of their blocks; give keys")
        if prompt.tenant:
            raise ControlError("keys belong to a room; name it, and no tenant")
        return partition, _keys(partition, prompt.keys)

    async def _partition(self, name: str) -> Partition:
        """Return a partition by its name; the only one for ""."""
        partitions = self._node.partitions
        if not name and len(partitions) == 1:
            name = partitions[0].key.name
        found = await self._registry.opener.named(name) if name else None
        if found is not None:
            return found
        names = ", ".join(sorted(self._partition_tenants())) or "none"
        what = f"no room is called {name!r}" if name else "name a room"
        raise ControlError(f"{what}; rooms: {names}", is_unknown=bool(name))


def _costs(measured: CostsNotice, partition: Partition) -> Costs:
    """Return what an engine has measured, for a planner."""
    seconds: dict[Route, dict[int, float]] = {}
    numbers: dict[Route, dict[int, int]] = {}
    for source, target, size, per_byte, num in measured.copies:
        if not 0 < per_byte < inf:
            continue
        seconds.setdefault((source, target), {})[size] = per_byte
        numbers.setdefault((source, target), {})[size] = num
    is_known = measured.prefill is not None and all(0 <= term < inf for term in measured.prefill)
    prefill = PrefillCost(*measured.prefill) if measured.prefill and is_known else None
    ways = ways_of((DEVICE, HOST), partition.cache.storages, ())
    return Costs(seconds, prefill, {}, ways, {}, numbers, measured.num_prefills)


def _open_partition(partition: Partition) -> RoomState:
    key = partition.key
    return RoomState(
        name=key.name,
        tenant=key.tenant,
        scope=key.scope.hex(),
        block_bytes=key.block_bytes,
        key_bytes=key.key_bytes,
        is_open=True,
        segments=len(partition.tier.segments),
        pinned_segments=len(partition.pins.segments),
        pinned_blocks=partition.pins.num_blocks,
        used_bytes=partition.used_bytes_by_tier(),
        capacity_bytes=partition.capacity_by_storage(),
        looked_up=partition.looked_up.by_place(),
        breakers=partition.breakers(),
        errors=partition.storage_errors(),
    )


def _keys(partition: Partition, keys: Sequence[str]) -> list[bytes]:
    """Return keys that are written in hexadecimal, each once."""
    size = partition.key.key_bytes
    if not keys:
        raise ControlError("no keys are named")
    if len(keys) > MAX_KEYS:
        raise ControlError(f"{len(keys)} keys are named; name at most {MAX_KEYS} at a time")
    for text in keys:
        if not HEXADECIMAL.fullmatch(text):
            raise ControlError(f"key {text[:80]!r} is not hexadecimal")
        if len(text) != 2 * size:
            raise ControlError(
                f"key {text[:80]!r} has {len(text) / 2:g} bytes; keys of room {partition.key.name} "
                f"have {size}"
            )
    packed = bytes.fromhex("".join(keys))
    return list(dict.fromkeys(PackedKeys(packed, size)))


def _found(partition: Partition, blocks: LocatedBlocks) -> PromptPlaces:
    return PromptPlaces.of(
        partition.key.name, [state.name.lower() for state in blocks.block_states]
    )
