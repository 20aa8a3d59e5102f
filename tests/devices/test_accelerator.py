"""The accelerator of this machine, if it has one that torch can compute on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

from kvtier.devices import Device, Direction, Memory, find_device  # noqa: E402
from kvtier.devices.driver_device import DriverDevice  # noqa: E402
from kvtier.devices.rig import open_rig  # noqa: E402
from kvtier.devices.torch_device import TorchDevice, tensor_memory  # noqa: E402
from kvtier.testing import DeviceSuite  # noqa: E402

Bytes = npt.NDArray[np.uint8]
FOUND = torch.accelerator.current_accelerator(check_available=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND is None, reason="torch finds no accelerator on this machine"),
]


def _tensor(memory: Memory) -> Any:
    """The tensor that this memory is of."""
    assert isinstance(memory.owner, torch.Tensor)
    return memory.owner


class OnAccelerator(DeviceSuite):
    """Memory and compute are torch's, on its current stream."""

    def make_memory(self, nbytes: int) -> Memory:
        assert FOUND is not None
        return tensor_memory(torch.zeros(nbytes, dtype=torch.uint8, device=FOUND.type))

    def fill(self, memory: Memory, data: Bytes) -> None:
        _tensor(memory).copy_(torch.from_numpy(data.copy()))
        torch.accelerator.synchronize()

    def content(self, memory: Memory) -> Bytes:
        return _tensor(memory).cpu().numpy().copy()

    def compute(self, memory: Memory, value: int) -> None:
        for other in (value + 1, value + 2, value):  # some work, of which the last one counts
            _tensor(memory).fill_(other % 256)


class TestFoundDevice(OnAccelerator):
    def make_device(self) -> Device:
        assert FOUND is not None
        return find_device(FOUND.type)


class TestTorchsOwnCopies(OnAccelerator):
    def make_device(self) -> Device:
        assert FOUND is not None
        return TorchDevice(FOUND.type)


def test_an_accelerator_with_a_driver_is_served_by_it() -> None:
    assert FOUND is not None
    if FOUND.type in ("cuda", "npu"):
        assert isinstance(find_device(FOUND.type), DriverDevice)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("copy_bytes", [2 << 10, 24 << 10, 256 << 10])
def test_every_way_brings_the_right_bytes(direction: Direction, copy_bytes: int) -> None:
    assert FOUND is not None
    device = find_device(FOUND.type)
    device.prepare()
    with open_rig(device, 64 << 20) as rig:
        for name, copy in {"usual": device.copy, **device.ways()}.items():
            right = rig.brings_the_right_bytes(copy, device.copy, direction, copy_bytes, 96)
            assert right, f"{name} brought wrong bytes"
