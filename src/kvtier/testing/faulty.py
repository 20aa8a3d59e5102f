"""Device wrapper with fault injection."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Event

import numpy as np

from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory


class FaultyDevice(Device):
    """Device wrapper that injects faults into copies.

    A copy is one submitted batch. Faults are planned per direction, because only the order of
    copies within a direction is fixed. With ``hold`` and ``release`` a test decides when the copies
    of a direction run, so it needs no sleeps.
    """

    def __init__(self, inner: Device) -> None:
        self.name = f"faulty {inner.name}"
        self.file_library = inner.file_library
        self.num_copies = dict.fromkeys(Direction, 0)
        self._inner = inner
        self._queues = {direction: _FaultyQueue(self, direction) for direction in Direction}
        self._gates = {direction: Event() for direction in Direction}
        self._faults: dict[tuple[Direction, int], Callable[[CopyBatch, Direction], None]] = {}
        self.release()

    # -- control by tests -------------------------------------------------------------------------

    def hold(self, *directions: Direction) -> None:
        """Make copies of these directions (default: both) wait until ``release``."""
        for direction in directions or Direction:
            self._gates[direction].clear()

    def release(self, *directions: Direction) -> None:
        """Let copies of these directions (default: both) run again."""
        for direction in directions or Direction:
            self._gates[direction].set()

    def fail(self, direction: Direction, nth: int = 1) -> None:
        """Make the ``nth`` copy from now raise ``DeviceError`` and move nothing."""
        self._plan(direction, nth, self._raise)

    def fail_half_way(self, direction: Direction, nth: int = 1) -> None:
        """Make the ``nth`` copy from now move the first half of the batch, then raise."""
        self._plan(direction, nth, self._copy_half)

    def crash(self, direction: Direction, nth: int = 1) -> None:
        """Make the ``nth`` copy from now raise an unexpected error, ``ZeroDivisionError``."""
        self._plan(direction, nth, self._divide_by_zero)

    def flip(self, direction: Direction, nth: int = 1) -> None:
        """Make the ``nth`` copy from now succeed with one wrong byte.

        The CPU must be able to write to the destination.
        """
        self._plan(direction, nth, self._copy_and_flip)

    def forget_faults(self) -> None:
        """Cancel all faults that have not happened yet."""
        self._faults.clear()

    # -- the device -------------------------------------------------------------------------------

    def queue(self, direction: Direction) -> CopyQueue:
        return self._queues[direction]

    def make_queue(self, direction: Direction) -> CopyQueue:
        return self._inner.make_queue(direction)

    def use(self) -> None:
        self._inner.use()

    def submit(self, batch: CopyBatch, direction: Direction) -> None:
        """Submit ``batch`` to the wrapped queue, or cause the planned fault."""
        self._gates[direction].wait()
        self.num_copies[direction] += 1
        fault = self._faults.pop((direction, self.num_copies[direction]), self._submit)
        fault(batch, direction)

    def inner_queue(self, direction: Direction) -> CopyQueue:
        """Return the wrapped device's queue."""
        return self._inner.queue(direction)

    def fence(self) -> Fence:
        return self._inner.fence()

    def allocate(self, nbytes: int) -> Memory:
        return self._inner.allocate(nbytes)

    def free(self, memory: Memory) -> None:
        self._inner.free(memory)

    def page_lock(self, memory: Memory) -> bool:
        return self._inner.page_lock(memory)

    def unlock(self, memory: Memory) -> None:
        self._inner.unlock(memory)

    def findings(self) -> list[Finding]:
        return [*self._inner.findings(), Finding("faults", f"{len(self._faults)} to come")]

    def close(self) -> None:
        self._inner.close()

    # -- faults -----------------------------------------------------------------------------------

    def _plan(
        self, direction: Direction, nth: int, fault: Callable[[CopyBatch, Direction], None]
    ) -> None:
        self._faults[direction, self.num_copies[direction] + nth] = fault

    def _submit(self, batch: CopyBatch, direction: Direction) -> None:
        self._inner.queue(direction).submit(batch)

    def _raise(self, batch: CopyBatch, direction: Direction) -> None:
        raise DeviceError(f"{self.name}: the test wants this {direction.value} to fail")

    def _divide_by_zero(self, batch: CopyBatch, direction: Direction) -> None:
        raise ZeroDivisionError(f"the test wants this {direction.value} to crash")

    def _copy_half(self, batch: CopyBatch, direction: Direction) -> None:
        """Copy the fragments before the middle one and half of that one, then raise."""
        middle = len(batch.size) // 2
        size = batch.size[: middle + 1].copy()
        size[middle:] //= 2
        some = slice(0, len(size))
        half = CopyBatch(batch.src, batch.dst, batch.src_offset[some], batch.dst_offset[some], size)
        self._submit(half, direction)
        self._raise(batch, direction)

    def _copy_and_flip(self, batch: CopyBatch, direction: Direction) -> None:
        self._inner.copy(batch, direction)  # waits, so that the byte can be flipped afterwards
        if batch.num_bytes:
            fragment = int(np.argmax(batch.size > 0))
            address = batch.dst.address + int(batch.dst_offset[fragment])
            byte = ctypes.c_uint8.from_address(address)
            byte.value ^= 0x01


class _FaultyQueue(CopyQueue):
    def __init__(self, device: FaultyDevice, direction: Direction) -> None:
        self._device = device
        self._direction = direction

    @property
    def _inner(self) -> CopyQueue:
        return self._device.inner_queue(self._direction)

    def hold_for(self, fence: Fence) -> None:
        self._inner.hold_for(fence)

    def submit(self, batch: CopyBatch) -> None:
        self._device.submit(batch, self._direction)

    def fence(self) -> Fence:
        return self._inner.fence()

    def drain(self) -> None:
        self._inner.drain()
