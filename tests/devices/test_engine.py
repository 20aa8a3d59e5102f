"""The embedded engine over fake drivers: the same logits, whatever path its KV came by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvtier.core.types import DEVICE, HOST
from kvtier.devices.calibration import calibrate
from kvtier.devices.driver_device import DriverDevice
from kvtier.serve.engine import Completion, Engine, SamplingParams
from tests.devices.drivers import make_device
from tests.kit.fakes.fake import Fake
from tests.serve.engine.conftest import SMALL

pytestmark = pytest.mark.engine
KEEP = SamplingParams(max_tokens=5, keep_logits=True)


@pytest.fixture
def engine(
    variant: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Engine, Fake]]:
    """An engine that computes on the CPU, in memory that counts as an accelerator's."""
    fake = Fake(variant)
    fake.reset(seed=3, late_reads=True, max_delay_us=50)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "kvtier.devices.driver_device.calibrate",
        lambda device: calibrate(device, (1024, 32768), (64,), repeats=1),
    )
    device = make_device(fake)
    monkeypatch.setattr("kvtier.serve.engine.engine.find_device", lambda name: device)
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1)
    with Engine(replace(SMALL, model=model)) as engine:
        tier: Any = engine.cache._tiers["device"]
        pool = tier.memory
        fake.adopt(pool.address, pool.nbytes)
        yield engine, fake
    assert isinstance(device, DriverDevice)
    fake.disown(pool.address)
    assert fake.violations == []
    assert fake.leaks == []
    assert fake.count("synchronous_copies") == 0


def _run(engine: Engine, prompt: list[int], salt: str = "") -> Completion:
    completion = engine.submit(prompt, KEEP, salt=salt).result(60)
    assert completion.logits is not None, completion.error
    return completion


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
@pytest.mark.parametrize("variant", ["cuda130", "cann83", "cann91"])
def test_kv_from_the_host_tier_gives_equal_logits(
    engine: tuple[Engine, Fake], make_prompt: Callable[[Engine, int], list[int]]
) -> None:
    served, fake = engine
    prompts = [make_prompt(served, start) for start in (0, 2000)]
    cold = [_run(served, prompt) for prompt in prompts]
    assert served.drain()
    for prompt, before in zip(prompts, cold, strict=True):
        served.clear_tier(DEVICE)
        warm = _run(served, prompt)
        assert warm.hit_tokens == {HOST: 288}
        assert np.array_equal(before.logits, warm.logits)
    fake.fail_late(code=700)
    served.clear_tier(DEVICE)
    late = _run(served, prompts[0])
    assert np.array_equal(cold[0].logits, late.logits), "what did not arrive is computed"


@pytest.fixture
def make_prompt() -> Callable[[Engine, int], list[int]]:
    text = Path(__file__).read_text() * 3

    def make(engine: Engine, start: int) -> list[int]:
        return engine.tokenizer.encode(text[start:])[:301]

    return make
