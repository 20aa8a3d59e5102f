"""The suite of devices over torch's memory and compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvtier.devices import Memory
from kvtier.devices.torch_device import tensor_memory
from kvtier.testing import DeviceSuite

Bytes = npt.NDArray[np.uint8]


def _tensor(memory: Memory) -> torch.Tensor:
    assert isinstance(memory.owner, torch.Tensor)
    return memory.owner


class TensorSuite(DeviceSuite):
    """Memory and compute are torch's, on its current stream. kind: the kind of device."""

    kind = "cpu"

    def make_memory(self, nbytes: int) -> Memory:
        return tensor_memory(torch.zeros(nbytes, dtype=torch.uint8, device=self.kind))

    def fill(self, memory: Memory, data: Bytes) -> None:
        _tensor(memory).copy_(torch.from_numpy(data.copy()))
        if self.kind != "cpu":
            torch.accelerator.synchronize()

    def content(self, memory: Memory) -> Bytes:
        return _tensor(memory).cpu().numpy().copy()

    def compute(self, memory: Memory, value: int) -> None:
        for other in (value + 1, value + 2, value):  # some work, of which the last one counts
            _tensor(memory).fill_(other % 256)
