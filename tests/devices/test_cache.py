"""The whole cache over fake drivers: the state machines that the CPU device has to pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.devices import Device, Memory
from kvtier.testing import FaultyDevice
from tests.cache.tokens.harness import A, Harness
from tests.cache.tokens.test_cache_machine import CacheMachine, StorageMachine, WriteBackMachine
from tests.devices.drivers import make_device
from tests.kit.fakes.fake import Fake

STEPS = settings(stateful_step_count=40, max_examples=max(12, settings.default.max_examples // 8))


class Gated(FaultyDevice):
    """Page-locks when the harness's own device grants it, and only then for real."""

    def __init__(self, gate: Device, device: Device) -> None:
        super().__init__(device)
        self._gate = gate

    def page_lock(self, memory: Memory) -> bool:
        return self._gate.page_lock(memory) and super().page_lock(memory)

    def unlock(self, memory: Memory) -> None:
        self._gate.unlock(memory)
        super().unlock(memory)


@pytest.fixture
def fake(variant: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A new machine for every harness; the pool is in its device's memory."""
    fake = Fake(variant)
    num_harnesss = 0

    def note() -> None:
        assert fake.violations == []
        assert fake.num_pending == 0
        assert fake.count("synchronous_copies") == 0, "host memory is page-locked"

    def choose_device(cpu: Device, pool: Memory) -> Device:
        nonlocal num_harnesss
        note()
        num_harnesss += 1
        fake.reset(num_harnesss, late_reads=True, max_delay_us=30 * (num_harnesss % 2))
        fake.adopt(pool.address, pool.nbytes)
        return Gated(cpu, make_device(fake))

    monkeypatch.setattr(Harness, "choose_device", staticmethod(choose_device))
    yield fake
    note()


@pytest.mark.parametrize("variant", ["cuda122", "cuda130", "cann83", "cann91", "hip72"])
@pytest.mark.parametrize("machine", [CacheMachine, StorageMachine, WriteBackMachine])
def test_nothing_is_wrong_or_lost_whatever_happens(fake: Fake, machine: type[CacheMachine]) -> None:
    harness = Harness(machine.policy)
    harness.serve(A)
    harness.lose_the_device()
    harness.serve(A)
    harness.close()
    assert fake.count("copies") >= 2, "down and up: a cache that copies does so by this driver"
    run_state_machine_as_test(machine, settings=STEPS)
