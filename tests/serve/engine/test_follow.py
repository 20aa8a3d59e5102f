"""A prompt that is computed while its prefix is still loading gets the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event
from typing import Any

import pytest

from kvtier.cache.lease import Lease
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import LayerGate
from kvtier.core.types import DEVICE, HOST
from kvtier.devices import CopyBatch, Device, Direction, Fence, Finding, Memory
from kvtier.devices.base import CopyQueue
from kvtier.devices.cpu import CpuDevice
from kvtier.serve.engine import Completion, Engine, EngineConfig
from kvtier.testing import FaultyDevice
from scripts.model_coverage import save

from .asking import GREEDY, ask, leave_below_the_device, same
from .conftest import SMALL, changed

pytestmark = pytest.mark.engine

MODELS = ("random-gqa", "random-llama", "random-mla")
NUM_LAYERS = 3

Make = Callable[[EngineConfig], Engine]
OnHost = Callable[..., tuple[Engine, list[int], Completion]]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every layer a step."""
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """Record the leases that were followed."""
    leases: list[Lease] = []
    follow = Cache.follow

    def noted(cache: Cache, lease: Lease) -> LayerGate | None:
        gate = follow(cache, lease)
        if gate is not None:
            leases.append(lease)
        return gate

    monkeypatch.setattr(Cache, "follow", noted)
    return leases


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDevice]:
    """Replace the device of engines made afterwards by one with injected faults."""
    device = FaultyDevice(CpuDevice(threads=1))
    monkeypatch.setattr("kvtier.serve.engine.engine.find_device", lambda name: device)
    yield device
    device.release()


@pytest.fixture
def on_host(make: Make, prompt: list[int]) -> OnHost:
    """Return a function that starts an engine with the KV of a prompt in the host tier only.

    The function returns the engine, the prompt, and its answer.
    """

    def started(
        num_tokens: int = 200, config: EngineConfig | None = None, **changes: Any
    ) -> tuple[Engine, list[int], Completion]:
        engine = make(config or changed(**changes))
        asked = prompt[:num_tokens]
        cold = ask(engine, asked)
        leave_below_the_device(engine)
        return engine, asked, cold

    return started


def check_nothing_leaked(engine: Engine) -> None:
    assert engine.drain()
    engine.call(engine.cache.check_invariants)
    for tier in (DEVICE, HOST):
        engine.clear_tier(tier)
    assert engine.call(engine.cache.used_slots) == {DEVICE: 0, HOST: 0}


class OnDemand(Device):
    """A device whose loads arrive only when compute is held for them.

    num_at_once: how many of the first loads arrive by themselves.
    """

    name = "on demand"
    num_at_once = 0

    def __init__(self) -> None:
        self.num_begun = 0
        self._inner = CpuDevice(threads=1)
        self._batches: list[CopyBatch] = []
        self._num_done = 0
        self._changed = Condition()

    def queue(self, direction: Direction) -> CopyQueue:
        return OnDemandQueue(self) if direction is Direction.LOAD else self._inner.queue(direction)

    def add(self, batch: CopyBatch) -> None:
        self._batches.append(batch)

    def point(self) -> Fence:
        return OnDemandFence(self, len(self._batches))

    def num_done(self) -> int:
        return self._num_done

    def bring(self, end: int) -> None:
        with self._changed:
            for batch in self._batches[self._num_done : end]:
                self._inner.copy(batch, Direction.LOAD)
            self._num_done = max(self._num_done, end)
            self._changed.notify_all()

    def await_(self, end: int) -> None:
        if self.num_begun <= self.num_at_once:
            self.bring(end)
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_done >= end, 60)

    def fence(self) -> Fence:
        return self._inner.fence()

    def page_lock(self, memory: Memory) -> bool:
        return False

    def unlock(self, memory: Memory) -> None:
        """Do nothing: no memory was locked."""

    def findings(self) -> list[Finding]:
        return []


class OnDemandFence(Fence):
    def __init__(self, device: OnDemand, end: int) -> None:
        self._device = device
        self._end = end

    @property
    def passed(self) -> bool:
        return self._device.num_done() >= self._end

    def wait(self) -> None:
        self._device.await_(self._end)

    def hold_compute(self) -> None:
        self._device.bring(self._end)


class OnDemandQueue(CopyQueue):
    def __init__(self, device: OnDemand) -> None:
        self._device = device

    def hold_for(self, fence: Fence) -> None:
        self._device.num_begun += 1
        fence.wait()

    def submit(self, batch: CopyBatch) -> None:
        self._device.add(batch)

    def fence(self) -> Fence:
        return self._device.point()

    def drain(self) -> None:
        """Do nothing: no load is in flight by itself."""


@pytest.fixture
def on_demand(monkeypatch: pytest.MonkeyPatch) -> OnDemand:
    device = OnDemand()
    monkeypatch.setattr("kvtier.serve.engine.engine.find_device", lambda name: device)
    return device


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_layer_waits_for_its_own_bytes(
    on_host: OnHost, model: str, on_demand: OnDemand, followed: list[Lease]
) -> None:
    engine, prompt, cold = on_host(300, model=model, device_capacity="32MiB", host="64MiB")
    warm = ask(engine, prompt)
    assert warm.hit_tokens == {HOST: 288}
    assert same(cold, warm)
    assert len(followed) == 1


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_with_windows_the_cells_arrive_first_and_then_every_layer_waits(
    on_host: OnHost, name: str, tmp_path: Path, on_demand: OnDemand, followed: list[Lease]
) -> None:
    save(name, name, tmp_path / "model")
    changes = {"model": str(tmp_path / "model"), "threads": 1, "max_model_tokens": 700}
    engine, prompt, cold = on_host(300, **changes)
    on_demand.num_at_once = on_demand.num_begun + 1
    warm = ask(engine, prompt)
    assert warm.hit_tokens == {HOST: 288}
    assert same(cold, warm)
    assert len(followed) == 1
    check_nothing_leaked(engine)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("skipped", range(NUM_LAYERS))
def test_a_layer_that_does_not_wait_is_noticed(
    on_host: OnHost,
    model: str,
    skipped: int,
    on_demand: OnDemand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control of the test above: bytes that arrive late change the answer."""
    hold, wait = LayerGate.hold_compute, LayerGate.wait

    def hasty(gate: LayerGate, layer: int) -> None:
        if layer != skipped:
            hold(gate, layer)

    def wait_for_all(gate: LayerGate) -> None:
        hold(gate, NUM_LAYERS - 1)
        wait(gate)

    monkeypatch.setattr(LayerGate, "hold_compute", hasty)
    monkeypatch.setattr(LayerGate, "wait", wait_for_all)
    engine, prompt, cold = on_host(300, model=model, device_capacity="32MiB", host="64MiB")
    warm = ask(engine, prompt)
    assert warm.hit_tokens == {HOST: 288}
    assert not same(cold, warm)


def test_a_prompt_of_several_chunks_follows_with_its_first(
    on_host: OnHost, text: str, on_demand: OnDemand, followed: list[Lease]
) -> None:
    engine, known, _ = on_host()
    longer = engine.tokenizer.encode(text)[:500]
    assert longer[:200] == known
    cold = ask(engine, longer, salt="cold")
    leave_below_the_device(engine)
    followed.clear()
    warm = ask(engine, longer)
    assert warm.hit_tokens == {HOST: 192}
    assert same(cold, warm)
    assert len(followed) == 1
    leave_below_the_device(engine)
    again = ask(engine, longer)
    assert again.hit_tokens == {HOST: 480}, "what followed a load is committed as ever"
    assert same(cold, again)


def test_following_can_be_turned_off(on_host: OnHost, followed: list[Lease]) -> None:
    engine, prompt, cold = on_host(follow_loads=False)
    assert same(cold, ask(engine, prompt))
    assert followed == []


def test_nobody_follows_while_another_generates(
    on_host: OnHost, faulty: FaultyDevice, followed: list[Lease]
) -> None:
    engine, prompt, cold = on_host(device_capacity="16MiB")
    started = Event()
    long = replace(GREEDY, max_tokens=400, keep_logits=False)
    first = engine.submit(prompt[:50][::-1], long, on_token=lambda token: started.set())
    assert started.wait(60)
    handle = engine.submit(prompt, GREEDY)
    warm = handle.result(60)
    assert not first.done
    first.abort()
    assert warm.hit_tokens == {HOST: 192}
    assert warm.token_ids == cold.token_ids
    assert followed == []


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
@pytest.mark.parametrize("fault", ["fail", "fail_half_way", "crash"])
@pytest.mark.parametrize("step", range(1, NUM_LAYERS + 1))
def test_a_step_that_fails_costs_another_load_and_no_answer(
    on_host: OnHost,
    model: str,
    fault: str,
    step: int,
    faulty: FaultyDevice,
    followed: list[Lease],
) -> None:
    engine, prompt, cold = on_host(model=model)
    getattr(faulty, fault)(Direction.LOAD, nth=step)
    warm = ask(engine, prompt)
    assert same(cold, warm)
    assert warm.hit_tokens == {HOST: 192}
    leave_below_the_device(engine)
    again = ask(engine, prompt)
    assert again.hit_tokens == {HOST: 192}
    assert same(cold, again)
    assert len(followed) == 3, "the one that failed, the one after it, and the last"
    check_nothing_leaked(engine)


def test_a_device_that_always_fails_costs_a_recomputation(
    on_host: OnHost, faulty: FaultyDevice
) -> None:
    engine, prompt, cold = on_host()
    for nth in range(1, 20):
        faulty.fail(Direction.LOAD, nth)
    warm = ask(engine, prompt)
    assert warm.num_cached_tokens == 0
    assert same(cold, warm)
    faulty.forget_faults()
    check_nothing_leaked(engine)


def test_a_load_that_hangs_holds_up_nobody_for_long(
    on_host: OnHost, faulty: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.transfer.copy_job.PATIENCE_S", 0.01)
    engine, prompt, cold = on_host()
    faulty.hold(Direction.LOAD)
    handle = engine.submit(prompt, GREEDY)
    assert not engine.submit(prompt[:100][::-1], GREEDY).result(60).error
    assert not handle.done
    faulty.release()
    warm = handle.result(60)
    assert warm.hit_tokens == {HOST: 192}, "it was only late for those that follow it"
    assert same(cold, warm)
    check_nothing_leaked(engine)


def test_a_load_past_its_deadline_is_recomputed(on_host: OnHost, faulty: FaultyDevice) -> None:
    cache = replace(SMALL.cache, load_deadline_s=0.05)
    engine, prompt, cold = on_host(config=replace(SMALL, cache=cache))
    faulty.hold(Direction.LOAD)
    warm = engine.submit(prompt, GREEDY).result(60)
    assert warm.num_cached_tokens == 0
    assert same(cold, warm)
    faulty.release()
    check_nothing_leaked(engine)


def test_a_client_may_leave_while_its_prompt_follows(
    on_host: OnHost, faulty: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.transfer.copy_job.PATIENCE_S", 0.01)
    engine, prompt, cold = on_host()
    faulty.hold(Direction.LOAD)
    handle = engine.submit(prompt, GREEDY)
    handle.abort()
    assert handle.result(60).finish_reason == "abort"
    faulty.release()
    assert same(cold, ask(engine, prompt))
    check_nothing_leaked(engine)
