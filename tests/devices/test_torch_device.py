"""The torch device on the CPU: the same suite, over tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtier.core.errors import DeviceError  # noqa: E402
from kvtier.devices import Device, Memory  # noqa: E402
from kvtier.devices.torch_device import TorchDevice, tensor_memory  # noqa: E402
from kvtier.layout import DType, full_attention, named_layout  # noqa: E402
from kvtier.testing import MemoryTierSuite  # noqa: E402
from kvtier.tiers import DeviceTier, HostTier, MemoryTier  # noqa: E402
from tests.devices.tensors import TensorSuite  # noqa: E402

GROUP = full_attention(2, 2, 4, DType.BFLOAT16, 2)


class TestTorchCpuDevice(TensorSuite):
    def make_device(self) -> Device:
        return TorchDevice("cpu")


class TestDeviceTierOverATensor(MemoryTierSuite):
    def make_tier(self, num_slots: int) -> MemoryTier:
        pool = torch.zeros(2, 2, num_slots, 2, 2, 4, dtype=torch.bfloat16)
        return DeviceTier(tensor_memory(pool), named_layout("layer_first", GROUP, num_slots))

    def make_device(self) -> Device:
        return TorchDevice("cpu")


class TestHostTierOfATorchDevice(MemoryTierSuite):
    def make_tier(self, num_slots: int) -> MemoryTier:
        return HostTier(GROUP, num_slots * GROUP.bytes_per_block, self.make_device())

    def make_device(self) -> Device:
        return TorchDevice("cpu")


def test_pool_must_be_contiguous() -> None:
    with pytest.raises(DeviceError, match="contiguous"):
        tensor_memory(torch.zeros(4, 4).t())


def test_unknown_device_is_refused_with_what_to_do() -> None:
    with pytest.raises(DeviceError, match="--device cpu"):
        TorchDevice("kettle")


def test_missing_device_is_refused_with_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(DeviceError, match="--device cpu"):
        TorchDevice("cuda")


def test_memory_is_printed_without_its_bytes() -> None:
    """A storage prints each byte: for an engine's tensors, a log line or traceback took hours."""
    storage = torch.zeros(1 << 16, dtype=torch.uint8).untyped_storage()
    assert len(repr(storage)) > storage.nbytes()
    memory = Memory(storage.data_ptr(), storage.nbytes(), "cpu", storage)
    assert len(repr(memory)) < 100
