"""Memory on both sides and test copies between them, for measurement and verification."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, Device, Direction, Memory

NUM_LAYERS = 32
"""Copies per block: contiguous in host memory, one per layer on the device."""

Copy = Callable[[CopyBatch, Direction], None]
"""Copies a batch and waits for it."""


class Rig:
    """``nbytes`` of host memory, page-locked if possible, and as much device memory."""

    def __init__(self, host: Memory, at_device: Memory, is_locked: bool) -> None:
        self.nbytes = host.nbytes
        self.is_locked = is_locked
        self.host = host
        self._at_device = at_device
        self._bytes = np.frombuffer(host.owner, np.uint8)  # type: ignore[call-overload]
        self._random = np.random.default_rng(0)

    def scattered(self, direction: Direction, copy_bytes: int, num_copies: int) -> CopyBatch:
        """Return ``num_copies`` copies of ``copy_bytes``: blocks of layers, in random order."""
        num_layers = min(NUM_LAYERS, num_copies)
        num_blocks = num_copies // num_layers
        host_block = self._random.permutation(num_blocks)[:, None]
        device_block = self._random.permutation(num_blocks)[:, None]
        layer = np.arange(num_layers)
        at_host = ((host_block * num_layers + layer) * copy_bytes).ravel()
        at_device = ((layer * num_blocks + device_block) * copy_bytes).ravel()
        return self._batch(direction, at_host, at_device, copy_bytes)

    def contiguous(self, direction: Direction, nbytes: int) -> CopyBatch:
        """Return one copy of ``nbytes``."""
        start = np.zeros(1, np.int64)
        return self._batch(direction, start, start, nbytes)

    def brings_the_right_bytes(
        self, copy: Copy, plain_copy: Copy, direction: Direction, copy_bytes: int, num_copies: int
    ) -> bool:
        """Whether ``copy`` does scattered copies of a direction correctly and changes nothing else.

        plain_copy: a trusted copy, for the memory around them.
        """
        batch = self.scattered(direction, copy_bytes, num_copies)
        area = self._bytes[: min(self.nbytes, 2 * batch.num_bytes)]
        content = self._random.integers(0, 256, len(area), np.uint8)
        over, back = (self.contiguous(each, len(area)) for each in Direction)
        if direction is Direction.LOAD:
            area[:] = 0
            plain_copy(over, Direction.LOAD)
            area[:] = content
            copy(batch, Direction.LOAD)
            plain_copy(back, Direction.STORE)
        else:
            area[:] = content
            plain_copy(over, Direction.LOAD)
            area[:] = 0
            copy(batch, Direction.STORE)
        expected = np.zeros_like(content)
        for at, to in zip(batch.src_offset.tolist(), batch.dst_offset.tolist(), strict=True):
            expected[to : to + copy_bytes] = content[at : at + copy_bytes]
        return bool(np.array_equal(area, expected))

    def _batch(
        self,
        direction: Direction,
        at_host: np.typing.NDArray[np.int64],
        at_device: np.typing.NDArray[np.int64],
        copy_bytes: int,
    ) -> CopyBatch:
        size = np.full(len(at_host), copy_bytes, np.int64)
        if direction is Direction.LOAD:
            return CopyBatch(self.host, self._at_device, at_host, at_device, size)
        return CopyBatch(self._at_device, self.host, at_device, at_host, size)


@contextmanager
def open_rig(device: Device, nbytes: int) -> Iterator[Rig]:
    """Yield a rig with ``nbytes`` on either side. Raises ``DeviceError`` if there is less."""
    try:
        arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceError(f"no {nbytes} bytes of host memory: {error}") from error
    view = np.frombuffer(arena, np.uint8)
    view[:: mmap.PAGESIZE] = 0
    host = Memory(view.ctypes.data, nbytes, "host", arena)
    at_device = device.allocate(nbytes)
    is_locked = device.page_lock(host)
    try:
        yield Rig(host, at_device, is_locked)
    finally:
        if is_locked:
            device.unlock(host)
        device.free(at_device)
