"""Any torch device, through torch's own streams, events and copies.

The reference path for accelerators: correct wherever ``torch.get_device_module`` knows the device
type, one asynchronous ``copy_`` per fragment. Faster paths bind the driver and replace ``copy``.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch

from kvtier.devices.base import CopyBatch, Device, Direction, Fence, Finding, Memory
from kvtier.errors import DeviceError

logger = logging.getLogger(__name__)


def tensor_memory(tensor: torch.Tensor) -> Memory:
    """The memory under a contiguous tensor."""
    if not tensor.is_contiguous():
        raise DeviceError(f"a pool must be contiguous, got strides {tensor.stride()}")
    return Memory(tensor.data_ptr(), tensor.nbytes, str(tensor.device.type), tensor)


def _flat_bytes(memory: Memory) -> torch.Tensor:
    """uint8 [nbytes] over the same bytes, whatever owns them."""
    if isinstance(memory.owner, torch.Tensor):
        return memory.owner.reshape(-1).view(torch.uint8)
    return torch.frombuffer(memory.owner, dtype=torch.uint8, count=memory.nbytes)


class _EventFence(Fence):
    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class TorchDevice(Device):
    """Copies by ``Tensor.copy_`` on a stream per direction.

    name: a torch device type or "type:index" ("cuda", "npu:1", "xpu"); "cpu" works and is
    synchronous.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._device = torch.device(name)
            self._module = torch.get_device_module(self._device)
        except RuntimeError as error:
            raise DeviceError(
                f"torch knows no device {name!r}: {error}. Install the torch build or plug-in "
                "for it, or use --device cpu"
            ) from error
        is_available = getattr(self._module, "is_available", lambda: True)
        if not is_available():
            raise DeviceError(f"no {name} device is available to torch; use --device cpu")

    @property
    def _is_asynchronous(self) -> bool:
        return self._device.type != "cpu"

    @cached_property
    def _streams(self) -> dict[Direction, torch.Stream]:
        return {direction: self._module.Stream(device=self._device) for direction in Direction}

    def copy(self, batch: CopyBatch, direction: Direction) -> None:
        src, dst = _flat_bytes(batch.src), _flat_bytes(batch.dst)
        pieces = zip(
            batch.src_offset.tolist(), batch.dst_offset.tolist(), batch.size.tolist(), strict=True
        )
        if not self._is_asynchronous:
            for at, to, size in pieces:
                dst[to : to + size].copy_(src[at : at + size])
            return
        stream = self._streams[direction]
        try:
            try:
                with self._module.stream(stream):
                    for at, to, size in pieces:
                        dst[to : to + size].copy_(src[at : at + size], non_blocking=True)
            finally:  # also after a copy that was refused: those before it may be in flight
                stream.synchronize()
        except RuntimeError as error:
            raise DeviceError(
                f"{self.name}: a {direction.value} of {batch.num_bytes} bytes failed: {error}"
            ) from error

    def fence(self) -> Fence:
        if not self._is_asynchronous:
            return _EventFence(None)
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return _EventFence(event)

    def page_lock(self, memory: Memory) -> bool:
        """CUDA and HIP register the arena in place; other devices copy from pageable memory."""
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
        """The runtime as torch binds it; None for a device that is not CUDA or HIP."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.cudart() if is_cuda else None  # type: ignore[no-untyped-call]

    def findings(self) -> list[Finding]:
        return [
            Finding("device", self.name),
            Finding(
                "copy path", "torch copy_ per fragment", "the reference path; works everywhere"
            ),
        ]
