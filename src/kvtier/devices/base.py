"""The seam of devices: who copies bytes between accelerator memory and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Direction(Enum):
    """Which way a batch goes; each way has a worker thread and a stream of its own."""

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
    """A point in the device's compute work."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all compute work queued before this point is done."""


class Device(ABC):
    """Copies between its own memory and host memory, and orders them against compute.

    The caller guarantees
        every offset and size of a batch lies inside its memories; the memories stay alive, and the
        destinations unread, until ``copy`` returns; one thread per direction calls ``copy``.
    The implementer provides
        ``copy`` returns when all bytes have arrived. Batch after batch of one direction in order;
        the two directions may overlap. ``fence`` is cheap and never waits.
    Outcomes and errors
        ``copy`` raises ``DeviceError`` when some byte may not have arrived; nothing of the batch is
        still in flight then. A device without page-locking answers ``page_lock`` with False.
    """

    name: str

    @abstractmethod
    def copy(self, batch: CopyBatch, direction: Direction) -> None:
        """Copy the whole batch. Runs on the caller's thread; blocks until the bytes are there."""

    @abstractmethod
    def fence(self) -> Fence:
        """A fence after all compute work that was queued on this device so far."""

    @abstractmethod
    def page_lock(self, memory: Memory) -> bool:
        """Make host memory directly readable by the device. True where that worked."""

    @abstractmethod
    def unlock(self, memory: Memory) -> None:
        """Undo ``page_lock``; nothing may be in flight."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """What this device uses, and why not something faster."""
