"""The seam of devices: copies between accelerator memory and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import DeviceError

Int64s = npt.NDArray[np.int64]


class Direction(Enum):
    """Direction of a batch of copies; each has a worker thread and a stream of its own."""

    LOAD = "load"
    """To the device."""
    STORE = "store"
    """From the device."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that holds blocks.

    address: of the first byte, as the device's copy calls expect it.
    kind: "host" or a device name.
    owner: object that keeps the memory alive; its type (a tensor, an mmap) may matter to a device.
    """

    address: int
    nbytes: int
    kind: str
    owner: object = field(repr=False)  # a storage of torch prints each of its bytes


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Many small copies between two memories. Offsets and sizes: int64 [num_copies], bytes.

    Destinations do not overlap; the copies may run in any order.

    num_bytes: the sum of the sizes; computed if not given.
    """

    src: Memory
    dst: Memory
    src_offset: Int64s
    dst_offset: Int64s
    size: Int64s
    num_bytes: int = -1

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            object.__setattr__(self, "num_bytes", int(self.size.sum()))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``kvtier doctor``: topic, result, and why the result is not better."""

    topic: str
    found: str
    note: str = ""


class Fence(ABC):
    """A point in a device's work, in its compute or the copies of one direction. Thread-safe."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether all work before this point is done. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all work before this point is done.

        Raises ``DeviceError`` if some of it failed; discard all its results then.
        """

    @abstractmethod
    def hold_compute(self) -> None:
        """Make compute that the calling thread queues from now on start after this point."""


class CopyQueue(ABC):
    """The copies of one direction, done in the order of their submission.

    The caller guarantees
        one thread at a time; every offset and size of a batch lies inside its memories; the
            memories stay alive, and the destinations unread, until a later fence has passed or
            ``drain`` has returned.
    The implementer provides
        batches in order, the copies within a batch in any order; the two directions of a device may
            overlap. ``hold_for`` and ``fence`` are cheap. A device without streams may do all of
            its work in ``submit``, and wait in ``hold_for``.
    Outcomes and errors
        ``submit`` raises ``DeviceError`` if it is refused, and the fences of copies that failed
            later raise it. In both cases copies may still be in flight until ``drain`` returns.
    """

    @abstractmethod
    def hold_for(self, fence: Fence) -> None:
        """Make everything submitted from now on start after ``fence``, a fence of this device."""

    @abstractmethod
    def submit(self, batch: CopyBatch) -> None:
        """Queue all copies of the batch."""

    @abstractmethod
    def fence(self) -> Fence:
        """Return the point after everything that was submitted so far."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing is in flight any more, successful or not."""

    def close(self) -> None:
        """Release a queue made by ``Device.make_queue``; nothing may be in flight."""
        return


class Device(ABC):
    """Copies between its own memory and host memory, and orders them against compute.

    The caller guarantees
        one thread at a time uses the queue of a direction.
    The implementer provides
        a queue for each direction; ``fence`` is cheap and never waits.
    Outcomes and errors
        a device without page-locking returns False from ``page_lock``.
    """

    name: str
    file_library: str = ""
    """Library that moves bytes between files and this device's memory, by its name in
    ``tiers.disk.io``; "" if none is known."""

    @abstractmethod
    def queue(self, direction: Direction) -> CopyQueue:
        """Return the queue of a direction, always the same one."""

    def make_queue(self, direction: Direction) -> CopyQueue:
        """Make an additional queue of a direction, for one thread, which closes it.

        Raises ``DeviceError`` if the device has no more.
        """
        raise DeviceError(f"{self.name} has one queue a direction, and it is in use")

    def use(self) -> None:
        """Make this the calling thread's current device, for libraries that depend on it."""
        return

    @abstractmethod
    def fence(self) -> Fence:
        """Return the point after all compute work that was queued on this device so far."""

    @abstractmethod
    def page_lock(self, memory: Memory) -> bool:
        """Make host memory directly accessible to the device. Return whether that worked."""

    @abstractmethod
    def unlock(self, memory: Memory) -> None:
        """Undo ``page_lock``; nothing may be in flight."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Describe the copy path in use, and why a faster one is not used."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory for measurements. Raises ``DeviceError`` if that fails."""
        raise DeviceError(f"{self.name} gives no {nbytes} bytes to measure with")

    def free(self, memory: Memory) -> None:
        """Free memory from ``allocate``."""
        del memory

    def prepare(self, again: bool = False) -> None:
        """Measure the copy paths, unless that was done before on this machine.

        Call it before the device is used. again: measure in any case.
        """
        return

    def close(self) -> None:
        """Release streams and other resources. Nothing may be in flight."""
        return

    def ways(self) -> Mapping[str, Callable[[CopyBatch, Direction], None]]:
        """Return the copy paths that ``copy`` chooses from, by name, to be measured."""
        return {}

    def copy(self, batch: CopyBatch, direction: Direction) -> None:
        """Copy the whole batch and wait for it.

        Raises ``DeviceError`` if some bytes may not have arrived; nothing is in flight then.
        """
        queue = self.queue(direction)
        try:
            queue.submit(batch)
            queue.fence().wait()
        except BaseException:
            queue.drain()
            raise

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the host memory nearest to the device; None if unknown."""
        return None
