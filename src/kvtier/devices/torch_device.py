"""Any torch device, through torch's own streams, events and copies.

The reference path for accelerators: correct on every device type that ``torch.get_device_module``
supports, with one asynchronous ``copy_`` per fragment. Faster devices bind the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory
from kvtier.devices.synchronous import Passed, SynchronousQueue

logger = logging.getLogger(__name__)


def tensor_memory(tensor: torch.Tensor) -> Memory:
    """Return the memory of a contiguous tensor."""
    if not tensor.is_contiguous():
        raise DeviceError(f"a pool must be contiguous, got strides {tensor.stride()}")
    return Memory(tensor.data_ptr(), tensor.nbytes, str(tensor.device.type), tensor)


def _flat_bytes(memory: Memory) -> torch.Tensor:
    """Return uint8 [nbytes] over the same memory."""
    if isinstance(memory.owner, torch.Tensor):
        return memory.owner.reshape(-1).view(torch.uint8)
    return torch.frombuffer(memory.owner, dtype=torch.uint8, count=memory.nbytes)


class _EventFence(Fence):
    def __init__(self, device: TorchDevice, event: torch.Event) -> None:
        self._device = device
        self._event = event

    @property
    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        with _reported(self._device.name):
            self._event.synchronize()

    def hold_compute(self) -> None:
        self._event.wait(self._device.compute_stream())

    def hold(self, stream: torch.Stream) -> None:
        """Make work that ``stream`` is given from now on start after this point."""
        stream.wait_event(self._event)


class _StreamQueue(CopyQueue):
    """Copies by ``Tensor.copy_`` on its own stream."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._stream = device.module.Stream(device=device.device)

    def hold_for(self, fence: Fence) -> None:
        if isinstance(fence, _EventFence):
            fence.hold(self._stream)
        else:
            fence.wait()

    def submit(self, batch: CopyBatch) -> None:
        with _reported(self._device.name), self._device.module.stream(self._stream):
            _copy_pieces(batch, non_blocking=True)

    def fence(self) -> Fence:
        event = self._device.module.Event()
        event.record(self._stream)
        return _EventFence(self._device, event)

    def drain(self) -> None:
        with suppress(RuntimeError):  # the error was reported by a fence
            self._stream.synchronize()


@contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{name}: a copy failed: {error}") from error


def _copy_pieces(batch: CopyBatch, non_blocking: bool = False) -> None:
    src, dst = _flat_bytes(batch.src), _flat_bytes(batch.dst)
    for at, to, size in zip(
        batch.src_offset.tolist(), batch.dst_offset.tolist(), batch.size.tolist(), strict=True
    ):
        dst[to : to + size].copy_(src[at : at + size], non_blocking=non_blocking)


class TorchDevice(Device):
    """Copies by ``Tensor.copy_`` on a stream per direction.

    name: a torch device type or "type:index" ("cuda", "npu:1", "xpu"); "cpu" works and is
    synchronous.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.device = torch.device(name)
            self.module = torch.get_device_module(self.device)
        except RuntimeError as error:
            raise DeviceError(
                f"torch knows no device {name!r}: {error}. Install the build of torch or the "
                "plug-in for it, or use --device cpu"
            ) from error
        is_available = getattr(self.module, "is_available", lambda: True)
        if not is_available():
            raise DeviceError(f"no {name} device is available to torch; use --device cpu")

    def queue(self, direction: Direction) -> CopyQueue:
        return self._queues[direction]

    def make_queue(self, direction: Direction) -> CopyQueue:
        if self.device.type == "cpu":
            return SynchronousQueue(_copy_pieces)
        return _StreamQueue(self)

    @cached_property
    def _queues(self) -> dict[Direction, CopyQueue]:
        if self.device.type == "cpu":
            return dict.fromkeys(Direction, SynchronousQueue(_copy_pieces))
        return {direction: _StreamQueue(self) for direction in Direction}

    def fence(self) -> Fence:
        if self.device.type == "cpu":
            return Passed()
        event = self.module.Event()
        event.record(self.compute_stream())
        return _EventFence(self, event)

    def compute_stream(self) -> torch.Stream:
        """Return the stream that the calling thread computes on."""
        stream = self.module.current_stream(self.device)
        assert isinstance(stream, torch.Stream)
        return stream

    def allocate(self, nbytes: int) -> Memory:
        try:
            return tensor_memory(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: no {nbytes} bytes: {error}") from error

    def page_lock(self, memory: Memory) -> bool:
        """Register the memory on CUDA and HIP; other devices copy from pageable memory."""
        register = getattr(self._cudart, "cudaHostRegister", None)
        if register is None:
            return False
        status = register(memory.address, memory.nbytes, 0)
        if int(status) != 0:
            logger.info("page_lock refused bytes=%d status=%s", memory.nbytes, status)
            return False
        return True

    def unlock(self, memory: Memory) -> None:
        self._cudart.cudaHostUnregister(memory.address)

    @cached_property
    def _cudart(self) -> Any:
        """The CUDA or HIP runtime as torch binds it; None for other devices."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.cudart() if is_cuda else None  # type: ignore[no-untyped-call]

    def findings(self) -> list[Finding]:
        return [
            Finding("device", self.name),
            Finding(
                "copy path", "torch copy_ per fragment", "the reference path; works everywhere"
            ),
        ]
