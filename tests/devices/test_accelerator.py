"""The accelerator of this machine, if it has one that torch can compute on."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtier.devices import Device, Direction, find_device  # noqa: E402
from kvtier.devices.driver_device import DriverDevice  # noqa: E402
from kvtier.devices.rig import open_rig  # noqa: E402
from kvtier.devices.torch_device import TorchDevice  # noqa: E402
from tests.devices.tensors import TensorSuite  # noqa: E402

FOUND = torch.accelerator.current_accelerator(check_available=True)
KIND = FOUND.type if FOUND else "none"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND is None, reason="torch finds no accelerator on this machine"),
]


class TestFoundDevice(TensorSuite):
    kind = KIND

    def make_device(self) -> Device:
        return find_device(KIND)


class TestTorchsOwnCopies(TensorSuite):
    kind = KIND

    def make_device(self) -> Device:
        return TorchDevice(KIND)


def test_an_accelerator_with_a_driver_is_served_by_it() -> None:
    if KIND in ("cuda", "npu"):
        assert isinstance(find_device(KIND), DriverDevice)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("copy_bytes", [2 << 10, 24 << 10, 256 << 10])
def test_every_way_brings_the_right_bytes(direction: Direction, copy_bytes: int) -> None:
    device = find_device(KIND)
    device.prepare()
    with open_rig(device, 64 << 20) as rig:
        for name, copy in {"usual": device.copy, **device.ways()}.items():
            right = rig.brings_the_right_bytes(copy, device.copy, direction, copy_bytes, 96)
            assert right, f"{name} brought wrong bytes"
