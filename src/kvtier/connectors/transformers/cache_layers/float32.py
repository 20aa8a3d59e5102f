"""Models of 16 bits in float32, for checks of what they compute.

In 16 bits rounding is as large as the differences of a model that does not continue its own cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from kvtier.core.system.memory import available_bytes

RESERVE_BYTES = 1 << 30
"""Memory that stays free beside the model in float32."""

HALVES = (torch.float16, torch.bfloat16)
PLAIN = (torch.Tensor, torch.nn.Parameter)


class NoFloat32Error(Exception):
    """A model cannot be computed in float32 here. Its message completes "because"."""


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float32 for a while. Its own tensors are put back unchanged.

    Raises ``NoFloat32Error`` if it can't: weights in other forms than plain tensors, no memory.
    """
    tensors = [*model.parameters(), *model.buffers()]
    _refuse_other_forms(model, tensors)
    halves = [tensor for tensor in tensors if tensor.dtype in HALVES]
    _refuse_large(halves)
    kept = [(tensor, tensor.data) for tensor in halves]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def _refuse_other_forms(model: PreTrainedModel, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            raise NoFloat32Error(f"its weights are of class {type(tensor).__name__}")
        if tensor.is_meta:
            raise NoFloat32Error("not all of its weights are in memory")
    if any(not weight.is_floating_point() for weight in model.parameters()):
        raise NoFloat32Error("its weights are quantised")


def _refuse_large(halves: list[torch.Tensor]) -> None:
    """Raise ``NoFloat32Error`` if a copy in float32 does not fit beside the tensors."""
    for kind in {tensor.device.type for tensor in halves}:
        num_bytes = sum(2 * tensor.nbytes for tensor in halves if tensor.device.type == kind)
        if kind == "cpu":
            left = available_bytes()[0]
        elif kind == "cuda":
            devices = {tensor.device for tensor in halves if tensor.device.type == kind}
            left = sum(torch.cuda.mem_get_info(device)[0] for device in devices)
        else:
            continue  # the device's allocator refuses
        if num_bytes + RESERVE_BYTES > left:
            raise NoFloat32Error(
                f"its weights take {num_bytes / 2**30:.1f} GiB in float32, and "
                f"{left / 2**30:.1f} GiB are left"
            )
