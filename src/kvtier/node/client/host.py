"""Memory of a node in a rank, in place of a host tier of the rank's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np

from kvtier.cache.guard import SlotGuard
from kvtier.core.types import Slot
from kvtier.devices.base import Device, Finding, Memory
from kvtier.index.selection import Int64s
from kvtier.node.client.channel import Channel, MappedMemory, NodeClient, NodeError

logger = logging.getLogger(__name__)

ATTACH_S = 0.05
"""Longest wait for a node that has new memory, in the step that first needs it."""


class SlotMemory(NamedTuple):
    """Memory in which slots lie.

    memory: begins with slot 0. seams: int64, offsets that no copy may cross. num_slots: number of
    slots. generations: int64 [num_slots]; None for a process's own memory.
    """

    memory: Memory
    seams: Int64s
    num_slots: int
    generations: Int64s | None = None


class NodeHost:
    """Slots of a node, as one rank sees them.

    The rank maps the node's memory, and registers its segments with the device when they are first
    used, on a thread of its own. A node that was started anew is attached to again.

    A block of the node has a part of each shard, one after the other. So a rank's part of slot
    ``s`` is the slot ``s * num_shards + shard`` of its own numbering. All parts have the same size;
    a rank whose part has another size (unequal pipeline stages) does not use the node's memory.

    Args:
        client: connections to the node.
        device: registers the memory.
        slot_bytes: bytes of a rank's part of a block.
        shard, num_shards: which part is this rank's, and how many there are.
    """

    def __init__(
        self, client: NodeClient, device: Device, slot_bytes: int, shard: int, num_shards: int
    ) -> None:
        self._client = client
        self._device = device
        self._block_bytes = slot_bytes * num_shards
        self._shard = shard
        self._num_shards = num_shards
        self._is_refused = False
        self._channel: Channel | None = None
        self._registered: set[tuple[str, int]] = set()
        self._queue: SimpleQueue[tuple[MappedMemory, int] | str | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._locked: list[tuple[str, Memory]] = []  # by instance
        self._old: set[str] = set()  # memories of earlier nodes that may be registered
        self._in_use: list[MappedMemory] = []  # memory that copies in flight may use

    def memory_of(self, guard: SlotGuard | None) -> SlotMemory | None:
        """Return where guarded slots lie; None if that memory can't be had."""
        if guard is None or not self._fits(guard):
            return None
        until_s = time.monotonic() + ATTACH_S
        try:
            partition = self._attached(guard.instance, until_s).partition(guard.partition, until_s)
        except NodeError as error:
            logger.warning("the node's memory can't be used: %s", error)
            if self._channel is not None:
                self._in_use.append(self._channel.mapped)
                self._client.put_back(self._channel, error)
                self._channel = None
            return None
        if partition.mapped.instance != guard.instance:
            return None
        mapped = partition.mapped
        step = mapped.segment_bytes
        seams = np.arange(step, mapped.memory.nbytes, step, dtype=np.int64)
        return SlotMemory(mapped.memory, seams, len(partition.generations), partition.generations)

    def _fits(self, guard: SlotGuard) -> bool:
        """Return whether the blocks of a partition are as many parts of this rank's size."""
        if guard.partition.block_bytes == self._block_bytes:
            return True
        if not self._is_refused:
            self._is_refused = True
            logger.warning(
                "the node is not used: this rank's part of a block has %d bytes, and that of the "
                "first rank %d; give all pipeline stages the same layers",
                self._block_bytes // self._num_shards,
                guard.partition.block_bytes // self._num_shards,
            )
        return False

    def _attached(self, instance: str, until_s: float) -> Channel:
        """Return a connection to the node with this memory, or to the one that is there now."""
        channel = self._channel
        if channel is None or not channel.is_open or channel.mapped.instance != instance:
            if channel is not None:
                self._old.add(channel.mapped.instance)
                self._in_use.append(channel.mapped)
                self._channel = None
                channel.close()
            self._channel = channel = self._client.take(until_s)
            self._client.note(None)
            self._old.discard(channel.mapped.instance)
        return channel

    def part(self, slots: Sequence[Slot | None]) -> list[Slot | None]:
        """Return this rank's part of each slot, in the rank's numbering; None stays None."""
        num, shard = self._num_shards, self._shard
        return [None if slot is None else Slot(slot * num + shard) for slot in slots]

    def register(self, guard: SlotGuard, slots: Sequence[Slot]) -> None:
        """Register the segments of slots with the device, soon."""
        channel = self._channel
        if self._device.name == "cpu" or channel is None:
            return
        mapped = channel.mapped
        begins = np.asarray(slots, np.int64) * self._block_bytes
        for segment in np.unique(begins // mapped.segment_bytes).tolist():
            if (guard.instance, segment) not in self._registered:
                self._registered.add((guard.instance, segment))
                self._queue.put((mapped, segment))
        if self._thread is None:
            self._thread = Thread(target=self._register, name="kvtier-node-lock", daemon=True)
            self._thread.start()

    def release_old(self) -> None:
        """Unregister and unmap the memory of earlier nodes, soon. No copy may be in flight."""
        for instance in self._old if self._thread is not None else ():
            self._queue.put(instance)
        self._old.clear()
        self._in_use.clear()

    def _register(self) -> None:
        while (each := self._queue.get()) is not None:
            if isinstance(each, str):
                self._unlock(each)
                continue
            mapped, segment = each
            memory, step = mapped.memory, mapped.segment_bytes
            piece = Memory(memory.address + segment * step, step, "host", memory.owner)
            try:
                if self._device.page_lock(piece):
                    self._locked.append((mapped.instance, piece))
            except Exception as error:  # from a plug-in device: copies are slower, but work
                logger.warning("page-locking failed bytes=%d error=%s", step, error)

    def _unlock(self, instance: str | None = None) -> None:
        """Unregister the memory of one instance, or of all."""
        for name, piece in list(self._locked):
            if instance is None or name == instance:
                self._device.unlock(piece)
                self._locked.remove((name, piece))

    def findings(self) -> list[Finding]:
        """Return findings for the log."""
        return [Finding("host memory", f"of the node {self._client.path}")]

    def close(self) -> None:
        """Unregister the memory, and detach from the node. No copy may be in flight."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._unlock()
        if self._channel is not None:
            self._client.put_back(self._channel)
        self._client.close()
