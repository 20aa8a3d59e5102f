"""The seam of devices: who copies bytes between accelerator memory and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.errors import DeviceError

Int64s = npt.NDArray[np.int64]


class Direction(Enum):
    """Direction of a batch of copies; each has a worker thread and a stream of its own."""

    LOAD = "load"
    """Towards the device."""
    STORE = "store"
    """Away from the device."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that blocks live in.

    address: of the first byte, as the device's copy calls want it. kind: "host" or a device name.
    owner: keeps the memory alive; a device may know its type (a tensor, an mmap).
    """

    address: int
    nbytes: int
    kind: str
    owner: object


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Many small copies between two memories. Offsets and sizes: int64 [num_copies], bytes.

    Destinations don't overlap; the order of the copies is free. num_bytes: the sum of the sizes,
    worked out where it is not given.
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
    """One line of ``kvtier doctor``: what was looked for, what was found, why not better."""

    topic: str
    found: str
    note: str = ""


class Fence(ABC):
    """A point in a device's work: in its compute, or in the copies of one direction.

    Any thread may use it, as often as it likes.
    """

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether all work before this point is done. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all work before this point is done.

        ``DeviceError`` where some of it failed; nothing of it may be used then.
        """

    @abstractmethod
    def hold_compute(self) -> None:
        """Compute that the calling thread queues from now on starts after this point."""


class CopyQueue(ABC):
    """The copies of one direction, done in the order of their submission.

    The caller guarantees
        one thread at a time; every offset and size of a batch lies inside its memories; the
        memories stay alive, and the destinations unread, until a later fence has passed or
        ``drain`` has returned.
    The implementer provides
        batch after batch in order, the copies within a batch in any; the two directions of a device
        may overlap. ``hold_for`` and ``fence`` are cheap. A device without streams may do all of
        its work in ``submit``, and wait in ``hold_for``.
    Outcomes and errors
        ``submit`` raises ``DeviceError`` where it was refused, and the fences of copies that failed
        later raise it; after either some copies may be in flight still, until ``drain`` returns.
    """

    @abstractmethod
    def hold_for(self, fence: Fence) -> None:
        """Make everything submitted from now on start after ``fence``, a fence of this device."""

    @abstractmethod
    def submit(self, batch: CopyBatch) -> None:
        """Queue all copies of the batch."""

    @abstractmethod
    def fence(self) -> Fence:
        """The point after everything that was submitted so far."""

    @abstractmethod
    def drain(self) -> None:
        """Return when nothing that was submitted is in flight any more, whatever became of it."""

    def close(self) -> None:
        """Give it back, where it came from ``Device.make_queue``; nothing may be in flight."""
        return


class Device(ABC):
    """Copies between its own memory and host memory, and orders them against compute.

    The caller guarantees
        one thread at a time uses the queue of a direction.
    The implementer provides
        a queue for each direction; ``fence`` is cheap and never waits.
    Outcomes and errors
        a device without page-locking answers ``page_lock`` with False.
    """

    name: str
    file_library: str = ""
    """Library that moves bytes between files and this device's memory, by its name in
    ``tiers.disk.io``; "" if none is known."""

    @abstractmethod
    def queue(self, direction: Direction) -> CopyQueue:
        """The queue of a direction, the same one each time."""

    def make_queue(self, direction: Direction) -> CopyQueue:
        """One more queue of a direction, for a thread of its own, which closes it.

        ``DeviceError`` where the device has no more.
        """
        raise DeviceError(f"{self.name} has one queue a direction, and it is in use")

    def use(self) -> None:
        """Make this the calling thread's device, for libraries that ask which one that is."""
        return

    @abstractmethod
    def fence(self) -> Fence:
        """The point after all compute work that was queued on this device so far."""

    @abstractmethod
    def page_lock(self, memory: Memory) -> bool:
        """Make host memory directly readable by the device. True where that worked."""

    @abstractmethod
    def unlock(self, memory: Memory) -> None:
        """Undo ``page_lock``; nothing may be in flight."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Describe the copy path in use, and why a faster one is not used."""

    def allocate(self, nbytes: int) -> Memory:
        """Memory of the device, to measure with. ``DeviceError`` where there is none."""
        raise DeviceError(f"{self.name} gives no {nbytes} bytes to measure with")

    def free(self, memory: Memory) -> None:
        """Give such memory back."""
        del memory

    def prepare(self, again: bool = False) -> None:
        """Measure what helps to copy faster, where that was not done on this machine before.

        To be called before the device is used. again: also where it was done.
        """
        return

    def close(self) -> None:
        """Give streams and the like back. Nothing may be in flight."""
        return

    def ways(self) -> Mapping[str, Callable[[CopyBatch, Direction], None]]:
        """Ways to copy that ``copy`` chooses from, each by its name, to be measured."""
        return {}

    def copy(self, batch: CopyBatch, direction: Direction) -> None:
        """Copy the whole batch, and return when the bytes are there.

        ``DeviceError`` where some may not be; nothing is in flight then.
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
        """The NUMA node of the host memory nearest to the device, where that is known."""
        return None
