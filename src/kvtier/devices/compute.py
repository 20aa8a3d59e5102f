"""Compute stream of an engine, as a driver handle."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.errors import DeviceError

Handle = int
"""A stream or an event, as a driver knows it."""

ComputeStream = Callable[[], Handle | None]
"""Returns the stream on which the calling thread computes, after all work that it queued was
submitted to the driver. None if compute is done when its call returns."""


def torch_compute(name: str, handle: str) -> ComputeStream:
    """Return a function that returns torch's current stream.

    The function reads the attribute at each call: torch_npu has its own queue in front of the
    driver, and reading the attribute flushes it.

    handle: attribute of torch's streams with the driver's handle.
    Raises ``DeviceError`` if torch cannot compute on the device.
    """
    try:
        import torch

        device = torch.device(name)
        module = torch.get_device_module(device)
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"torch can't compute on {name}: {error}") from error
    if not module.is_available():
        raise DeviceError(f"this build of torch ({torch.__version__}) can't compute on {name}")

    def current() -> Handle:
        return int(getattr(module.current_stream(device), handle))

    return current
