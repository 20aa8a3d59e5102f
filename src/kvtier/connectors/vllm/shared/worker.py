"""A rank's side: copies between vLLM's tensors and the slots of this rank's host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvtier.cache.guard import SlotGuard
from kvtier.cache.transfer import Job, LocalMover, TransferEngine, behind
from kvtier.cache.transfer.ranks import Compared, Hello, RankExecutor, RankOrder, Report
from kvtier.connectors.common.paged_pool import GroupPages, PagedPool, split
from kvtier.connectors.common.recomputed import Comparer
from kvtier.connectors.vllm.shared.copies import (
    BlockSlots,
    PageCopy,
    PageRange,
    SlotCheck,
    pages_with_slots,
)
from kvtier.connectors.vllm.shared.cores import off_compute_cores
from kvtier.connectors.vllm.shared.names import EngineFacts
from kvtier.connectors.vllm.shared.pages import Cache, EnginePages, LayerSize, tell_tokens
from kvtier.connectors.vllm.shared.rank_weights import Look, ParameterWatch
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.errors import TierError
from kvtier.core.types import DISK, HOST, Direct, Slot
from kvtier.devices import Device, Direction, Finding
from kvtier.layout import opaque
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.host import NodeHost, SlotMemory
from kvtier.tiers import HostTier, StorageTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.memory.arena import ArenaOptions
from kvtier.tiers.memory.slots import check_slots
from kvtier.tiers.remote.warm_start import WarmStart
from kvtier.tiers.row import make_storage
from kvtier.tiers.wrappers import Shards, ShardTier, ThrottledTier

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0

LOOK_S = 0.25
"""Seconds between reports of a rank in which nothing moves. They have the room in host memory and
on disk, breakers, and verified blocks."""
REST_S = 1e-3
REST_PIECE_S = 1e-4
"""Longest sleep of a rank in a step that computes nothing, in pieces between which it polls its
copies. vLLM sleeps as long between such steps."""


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Memory and disk of one rank.

    num_slots: of host memory. disk: None for none, or if another rank has it. bytes_per_s: of the
    disk, at most; 0 for no limit. shared: file of host memory that all ranks map, if they keep the
    same.

    stores: URLs, in each of which ``store_bytes`` are this rank's. num_shards: into how many a
    block is cut, each of which is another rank's. node: has the memory, if it is not this rank's.
    shards: that this rank has of a block in stores; None if it has the whole block.
    coding: codec and keys of blocks in stores.
    warm: see ``LocalMover``.
    """

    slot_bytes: int
    num_slots: int
    disk: DiskOptions | None = None
    bytes_per_s: int = 0
    shared: Path | None = None
    stores: Sequence[str] = field(default=(), repr=False)  # a password may be in it
    store_bytes: int = 0
    num_shards: int = 1
    node: NodeClient | None = None
    shards: Shards | None = None
    coding: CodingConfig = DEFAULT_CODING
    warm: WarmStart | None = None


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that has ended. Size and time are 0 if they do not show the copy's speed."""

    job_id: int
    num_bytes: int = 0
    seconds: float = 0.0
    has_failed: bool = False


class TierWorker:
    """Carries out the scheduler's copies, each direction on a thread and a stream of its own.

    A store starts after the compute that was queued when it was submitted. A load starts after work
    that may still read the pages that it overwrites.

    ``take_ended`` reports every copy, and ``take_report`` the slots of failed copies.
    """

    def __init__(
        self,
        pages: EnginePages,
        device: Device,
        limits: RankLimits,
        pages_per_block: int,
        rank: int,
    ) -> None:
        self._device = device
        self.pages_per_block = pages_per_block
        self._rank = rank
        self._pool = pages.pool(pages_per_block, limits.slot_bytes)
        device.prepare()
        self._host = _host(limits, device, rank)
        self._executor: RankExecutor | None = None
        self._storages: list[StorageTier] = []
        if isinstance(self._host, HostTier):
            self._open_storages(self._host, limits)
        self._engine = TransferEngine(device)
        self._engine.start()
        self._copies: dict[int, PageCopy] = {}
        self._failed_slots: set[Slot] = set()
        self._comparer: Comparer | None = None
        self._compared: dict[bytes, Compared] = {}
        self._weights: ParameterWatch | None = None
        self._weights_number = 0
        self._look: Look | None = None  # of the copies that are submitted together
        self._has_new_weights = False
        found = None if self._executor is None else self._executor.found()
        direct = (
            storage.name for storage in self._storages if storage.facts.direct is not Direct.OFF
        )
        self._hello = Hello(
            self._num_open(), found, frozenset(direct), self._num_blocks_in_storage()
        )
        self._is_told = False
        self._next_look_s = 0.0
        _log((*device.findings(), *self._host.findings()))

    def _open_storages(self, host: HostTier, limits: RankLimits) -> None:
        """Open this rank's storage, and begin to carry out orders for it."""
        try:
            self._storages = _storages(limits, host, self._pool, self._device)
        except BaseException:
            host.close()  # shared memory would stay when the process has gone
            raise
        if self._storages:
            storages = {storage.name: storage for storage in self._storages}
            mover = LocalMover({host.name: host, **storages}, None, warm=limits.warm)
            mover.start()
            kept = {name: storages[name].kept_keys() for name in (DISK,) if name in storages}
            self._executor = RankExecutor(host, mover, kept, self._rank, limits.num_shards)
            _log([finding for storage in self._storages for finding in storage.findings()])

    def audit(
        self,
        kv_caches: Mapping[str, Cache],
        groups: Sequence[Sequence[LayerSize]],
        facts: EngineFacts,
    ) -> None:
        """Be ready to compare blocks. groups: the layers of each KV group."""
        places = [
            tell_tokens(kv_caches, layers, self._pool, at, facts)
            for at, layers in enumerate(groups)
        ]
        with off_compute_cores():
            self._comparer = Comparer(self._pool, self._device, places)

    def watch_weights(self, model: torch.nn.Module | None) -> None:
        """Notice changes of this rank's model. None: only the scheduler's process notices some."""
        self._weights = None if model is None else ParameterWatch(model)

    def note_weights(self, number: int) -> None:
        """Note how often the scheduler's half has noticed new weights. It knows those of now."""
        if number != self._weights_number and self._weights is not None:
            self._weights.begin_anew()
        self._weights_number = number

    def _num_open(self) -> int:
        """Return the open slots of this rank's own memory."""
        return self._host.num_open if isinstance(self._host, HostTier) else 0

    def take_ended(self) -> list[EndedCopy]:
        """Return the copies that have ended since the last call."""
        self._look = None
        done = [job_id for job_id, copy in self._copies.items() if copy.done]
        ended = [self._finish(job_id) for job_id in done]
        if ended and not self._copies and isinstance(self._host, NodeHost):
            self._host.release_old()
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self._copies:
                self._copies[job_id].wait()

    def shutdown(self) -> None:
        is_over = self._engine.close(CLOSE_WAIT_S)
        if self._executor is not None:
            is_idle = self._executor.close(CLOSE_WAIT_S)
            is_over = is_over and is_idle
            for storage in self._storages if is_idle else ():
                storage.close()
        if self._comparer is not None:
            is_over = self._comparer.close(CLOSE_WAIT_S) and is_over
        if is_over:
            self._host.close()
            self._device.close()

    # -- reports and orders ------------------------------------------------------------------------

    @property
    def job_ids(self) -> Collection[int]:
        """Copies that vLLM does not know to be done yet."""
        return self._copies.keys()

    def carry_out(self, order: RankOrder) -> None:
        """Begin what the scheduler ordered, on the ranks that have storage."""
        if self._executor is not None:
            self._executor.carry_out(order)

    def may_report(self) -> bool:
        """Whether ``take_report`` is due: after a change, and at least every ``LOOK_S``."""
        moves = self._executor is not None and not self._executor.is_idle
        now_s = time.monotonic()
        if not (moves or self._failed_slots or self._has_new_weights) and now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_S
        return True

    def take_report(self, steps: frozenset[int]) -> Report:
        """Return this rank's report to the scheduler. steps: that were computed."""
        if not self._is_told and isinstance(self._host, HostTier):
            self._host.arena.forget_file()  # every rank was made before the first step
        failed, self._failed_slots = frozenset(self._failed_slots), set()
        report = Report(
            hellos=self._hellos(),
            failed=failed,
            steps=steps,
            has_new_weights=self._has_new_weights,
            compared=self._compared,
        )
        self._has_new_weights, self._compared = False, {}
        if self._executor is None:
            return report
        return replace(
            report,
            done=self._executor.take_done(),
            scrubbed=self._executor.take_scrubbed(),
            warmed=self._executor.take_warmed(),
            pieces=self._executor.take_pieces(),
            breakers=self._executor.take_breakers(),
        )

    def _hellos(self) -> dict[int, Hello]:
        """Return this rank's state, by rank, if it has changed; else {}."""
        before = Hello(self._hello.num_open, num_blocks=self._hello.num_blocks)
        now = Hello(self._num_open(), num_blocks=self._num_blocks_in_storage())
        if self._is_told and now == before:
            return {}
        first = replace(self._hello, num_open=now.num_open, num_blocks=now.num_blocks)
        self._hello = now if self._is_told else first
        self._is_told = True
        return {self._rank: self._hello}

    def _num_blocks_in_storage(self) -> dict[str, int]:
        """Return the room of each storage tier, in blocks; less where a disk lost some of it."""
        return {storage.name: storage.num_blocks for storage in self._storages}

    def rest(self) -> None:
        """Sleep in a step that computes nothing; less where a copy is done before.

        vLLM takes such steps for as long as something is under way, and waits for each one with
        sched_yield(2). On its core that starves threads that were interrupted, for seconds on some
        kernels (seen on 6.18): ours, and those of the kernel that complete what a disk has done.
        What vLLM waits for would never end.
        """
        for _ in range(round(REST_S / REST_PIECE_S)):
            if any(copy.done for copy in self._copies.values()):
                return
            time.sleep(REST_PIECE_S)

    # -- copies ------------------------------------------------------------------------------------

    def submit(
        self, job_id: int, pages: Sequence[PageRange], slots: BlockSlots, direction: Direction
    ) -> None:
        """Begin a copy between pages, one range per KV group, and the slots of their blocks."""
        touched = frozenset(slots.slots)
        memory = _memory(self._host, slots.guard)
        if memory is None:
            job = Job(0)
            job.finish(TierError(HOST, "copy", "the node's memory can't be used"))
            self._copies[job_id] = PageCopy(direction, touched, job)
            return
        check_slots(tuple(touched), memory.num_slots)
        if self._look is None and self._weights is not None:
            self._look = self._weights.look()
        groups = pages_with_slots(pages, slots, self.pages_per_block)
        if slots.reads:
            self._copies[job_id] = self._read_direct(groups, slots, touched)
            return
        if isinstance(self._host, NodeHost) and slots.guard is not None:
            self._host.register(slots.guard, slots.slots)
            part = self._host.part
            groups = [replace(group, slots=part(group.slots)) for group in groups]
        audit, read_slots, copied = None, slots.slots, [groups]
        if direction is Direction.STORE:
            read_slots = [slots.slots[at] for at in slots.audits]
        if slots.audits:
            assert self._comparer is not None, "an order to compare, for a rank without a comparer"
            touched -= frozenset(read_slots)
            compared, copied = split(groups, slots.audits, self.pages_per_block)
            audit = self._comparer.begin(compared, list(slots.audits.values()), memory.memory)
        batches = [
            self._pool.stage(some, memory.memory, direction, memory.seams) for some in copied
        ]
        job = self._engine.submit([*batches, *(audit.batches if audit else ())], direction)
        if audit is not None and self._comparer is not None:
            self._comparer.compare(audit, job)
        check = SlotCheck.of(memory, slots.guard, read_slots)
        self._copies[job_id] = PageCopy(
            direction, touched, job, check=check, look=self._look, audit=audit
        )

    def _read_direct(
        self, groups: Sequence[GroupPages], slots: BlockSlots, touched: frozenset[Slot]
    ) -> PageCopy:
        """Begin a load that reads some blocks directly from storage, and others from their slots.

        Both wait for whatever may still use these pages.
        """
        assert self._executor is not None, "a rank without storage is told to read from it"
        job, n = None, self.pages_per_block
        is_direct = np.zeros(sum(len(group.slots) for group in groups), bool)
        is_direct[list(slots.direct)] = True
        pages, at = [], 0
        for group in groups:
            here = is_direct[at : (at := at + len(group.slots))]
            pages.append(group.by_block(n)[here])
        if touched:
            _, kept = split(groups, frozenset(slots.direct), n)
            memory = _memory(self._host, None)
            assert memory is not None, "a rank without memory of its own is told to read"
            steps = [
                self._pool.stage(some, memory.memory, Direction.LOAD, memory.seams) for some in kept
            ]
            job = self._engine.submit(steps, Direction.LOAD)
        blocks = self._pool.pieces(pages)
        direct = np.flatnonzero(is_direct).tolist()
        place = {at: number for number, at in enumerate(direct)}
        fence = self._device.fence()
        reads = [
            self._executor.read(
                order, behind(fence, partial(blocks.pick, [place[at] for at in order.slots]))
            )
            for order in slots.reads
        ]
        return PageCopy(Direction.LOAD, touched, job, reads, look=self._look)

    def _finish(self, job_id: int) -> EndedCopy:
        copy = self._copies.pop(job_id)
        holds = copy.check is None or copy.check.holds
        if copy.audit is not None and self._comparer is not None:
            compared = self._comparer.end(copy.audit)
            self._compared.update(compared if holds else {})
        if copy.look is not None and copy.look.has_changed:
            self._note_new_weights()
            if copy.direction is Direction.STORE:
                self._failed_slots |= copy.slots
            return EndedCopy(job_id, has_failed=True)
        if copy.error is not None:
            logger.error("copy failed direction=%s error=%s", copy.direction.value, copy.error)
            if copy.job is not None and copy.job.error is not None:
                self._failed_slots |= copy.slots
            return EndedCopy(job_id, has_failed=True)
        if copy.direction is Direction.LOAD and not holds:
            logger.warning("a load is computed: the node gave its slots to other blocks meanwhile")
            return EndedCopy(job_id, has_failed=True)
        if copy.job is None:
            return EndedCopy(job_id)  # a report has the time that reads took
        return EndedCopy(job_id, copy.job.num_bytes, copy.job.seconds)

    def _note_new_weights(self) -> None:
        """Have the scheduler's half give KV another name, once for all copies of a look."""
        if not self._has_new_weights and self._weights is not None:
            logger.warning("the weights of the model were replaced rank=%d", self._rank)
            self._weights.begin_anew()
        self._has_new_weights = True


def _host(limits: RankLimits, device: Device, rank: int) -> HostTier | NodeHost:
    """Return the memory of a rank's slots: a tier of its own, or a node's."""
    if limits.node is not None:
        shard = rank % limits.num_shards
        return NodeHost(limits.node, device, limits.slot_bytes, shard, limits.num_shards)
    arena = ArenaOptions(file=limits.shared)
    capacity = limits.num_slots * limits.slot_bytes
    return HostTier(opaque(limits.slot_bytes), capacity, device, arena)


def _memory(host: HostTier | NodeHost, guard: SlotGuard | None) -> SlotMemory | None:
    """Return where slots lie; None if the node's memory can't be used."""
    if isinstance(host, NodeHost):
        return host.memory_of(guard)
    return SlotMemory(host.memory, host.seams, host.num_slots)


def _storages(
    limits: RankLimits, host: HostTier, pool: PagedPool, device: Device
) -> list[StorageTier]:
    """Open the storage tiers of this rank, fastest first. A failure leaves nothing open.

    pool: of ``device``; blocks may be read into it directly from the disk.
    """
    group, memory = host.layout.group, host.ready_memory
    made: list[StorageTier] = []
    with ExitStack() as undo:
        if limits.disk is not None:
            reached = _reached(limits.disk.direct, pool, device)
            disk: StorageTier = DiskTier(limits.disk, group, memory, pool=reached)
            undo.callback(disk.close)
            made.append(ThrottledTier(disk, limits.bytes_per_s) if limits.bytes_per_s else disk)
        for location in limits.stores:
            shards = limits.shards
            of_store = group if shards is None else opaque(shards.bytes_per_shard)
            store = make_storage(location, of_store, limits.store_bytes, memory, limits.coding)
            undo.callback(store.close)
            made.append(store if shards is None else ShardTier(store, shards))
        undo.pop_all()
    return made


def _reached(direct: Direct, pool: PagedPool, device: Device) -> Pool | None:
    """The pages that the disk may read blocks to. Raises ``ConfigError``."""
    if direct is Direct.OFF:
        return None
    if not (reason := pool.why_not_direct):
        return pool.direct_pool(device)
    if direct is Direct.ON:
        raise VllmSettings.wrong(f"disk_direct is on, and {reason}; leave it off")
    logger.info("disk to device: through host memory %s", reason)
    return None


def _log(findings: Sequence[Finding]) -> None:
    for finding in findings:
        logger.info("%s: %s %s", finding.topic, finding.found, finding.note)
