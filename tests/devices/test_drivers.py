"""Every variant of every driver, by the suite that all devices have to pass.

Each test also fails where its fake saw something that a real machine might punish, or where
something was not given back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvtier.devices import Device, Memory
from kvtier.devices.driver_device import DriverDevice
from kvtier.testing import DeviceSuite
from kvtier.testing.memory import Bytes
from tests.devices.drivers import host_compute, make_device, page_locked
from tests.kit.fakes.fake import VARIANTS, Fake

_seeds = itertools.count()


class OnFake(DeviceSuite):
    """Memory that only the driver reaches, and compute on a stream, or at once."""

    fake: Fake
    is_synchronous: bool
    is_page_locked: bool
    stream: int

    @pytest.fixture(autouse=True)
    def _judged(self, variant: str, compute: str, host: str) -> Iterator[None]:
        self.fake = Fake(variant)
        seed = next(_seeds)
        self.fake.reset(seed, late_reads=seed % 2 == 0, max_delay_us=100 * (seed % 3))
        self.is_synchronous = compute == "synchronous"
        self.is_page_locked = host == "page-locked"
        self.stream = 0 if compute == "default stream" else self.fake.compute_stream()
        self._devices: list[DriverDevice] = []
        self._locked: list[tuple[DriverDevice, Memory]] = []
        self._allocated: list[Memory] = []
        yield
        for device, memory in self._locked:
            device.unlock(memory)
        for device in self._devices:
            device.close()
        for memory in self._allocated:
            self.fake.free(memory.address)
        assert self.fake.violations == []
        assert self.fake.leaks == []

    def make_device(self) -> Device:
        stream = host_compute if self.is_synchronous else (lambda: self.stream)
        self._devices.append(make_device(self.fake, 0, stream))
        return self._devices[-1]

    def make_memory(self, nbytes: int) -> Memory:
        memory = Memory(self.fake.allocate(nbytes), nbytes, "fake", None)
        self._allocated.append(memory)
        return memory

    def make_host_memory(self, device: Device, nbytes: int) -> Memory:
        if not self.is_page_locked:
            return super().make_host_memory(device, nbytes)
        assert isinstance(device, DriverDevice)
        self._locked.append((device, page_locked(device, nbytes)))
        return self._locked[-1][1]

    def fill(self, memory: Memory, data: Bytes) -> None:
        self.fake.poke(memory.address, data)

    def content(self, memory: Memory) -> Bytes:
        return self.fake.peek(memory.address, memory.nbytes)

    def compute(self, memory: Memory, value: int) -> None:
        self.fake.fill(memory.address, memory.nbytes, value, self.stream)
        if self.is_synchronous:
            self.fake.wait_for(self.stream)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("compute", "host"),
    [("own stream", "page-locked"), ("default stream", "pageable"), ("synchronous", "page-locked")],
)
class TestDrivers(OnFake):
    pass
