"""The CPU device and the fault wrapper, by the suite that every device has to pass."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.errors import DeviceError
from kvtier.devices import CopyBatch, Device, Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.testing import DeviceSuite, FaultyDevice, host_memory, memory_bytes


class TestCpuDevice(DeviceSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestCpuDeviceOnOneThread(DeviceSuite):
    def make_device(self) -> Device:
        return CpuDevice(threads=1)


class TestFaultyDeviceWithoutFaults(DeviceSuite):
    def make_device(self) -> Device:
        return FaultyDevice(CpuDevice(threads=1))


def _batch(num_copies: int = 4) -> CopyBatch:
    src, dst = host_memory(64), host_memory(64)
    memory_bytes(src)[:] = np.arange(1, 65)
    offset = np.arange(num_copies, dtype=np.int64) * 8
    return CopyBatch(src, dst, offset, offset, np.full(num_copies, 8, np.int64))


def test_nth_copy_fails_once() -> None:
    device = FaultyDevice(CpuDevice())
    device.fail(Direction.LOAD, nth=2)
    device.copy(_batch(), Direction.LOAD)
    device.copy(_batch(), Direction.STORE)
    with pytest.raises(DeviceError, match="load"):
        device.copy(_batch(), Direction.LOAD)
    device.copy(_batch(), Direction.LOAD)
    assert device.num_copies == {Direction.LOAD: 3, Direction.STORE: 1}


@pytest.mark.parametrize("num_copies", [1, 2, 3, 8])
def test_copy_that_fails_half_way_moves_some_bytes_but_not_all(num_copies: int) -> None:
    device, batch = FaultyDevice(CpuDevice()), _batch(num_copies)
    device.fail_half_way(Direction.STORE)
    with pytest.raises(DeviceError):
        device.copy(batch, Direction.STORE)
    assert 0 < np.count_nonzero(memory_bytes(batch.dst)) < batch.num_bytes


def test_flipped_byte_is_one_wrong_byte() -> None:
    device, batch = FaultyDevice(CpuDevice()), _batch(8)
    device.flip(Direction.LOAD)
    device.copy(batch, Direction.LOAD)
    assert np.count_nonzero(memory_bytes(batch.dst) != memory_bytes(batch.src)) == 1


def test_forgotten_faults_do_not_happen() -> None:
    device = FaultyDevice(CpuDevice())
    device.crash(Direction.LOAD)
    device.forget_faults()
    device.copy(_batch(), Direction.LOAD)
