"""Compute stream of an engine, as a driver handle."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import DeviceError

Handle = int
"""A stream or an event, as a driver knows it."""

ComputeStream = Callable[[], Handle | None]
"""The stream that the calling thread computes on, when all that it queued before has really been
handed to the driver; None where compute is done when its call returns."""


def torch_compute(name: str, handle: str) -> ComputeStream:
    """The current stream of torch. handle: the attribute of its streams that a driver understands.

    It is read anew each time: torch_npu keeps a queue of its own in front of the driver, and
    reading the attribute empties it. Raises ``DeviceError`` where torch can't compute there.
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
