"""Damage for the negative control: real, noticed, and undone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.config import CacheConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.tools.bench_serve.engines import clear_tiers, run_one, settle
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.bench_serve.tamper import Damage, _Blocks, damaged
from kvtier.types import DEVICE, HOST

pytestmark = pytest.mark.engine

CHUNK = 32
PROMPT = tuple(range(100, 100 + 4 * CHUNK + 5))
OTHER = tuple(range(1000, 1000 + 3 * CHUNK))


@pytest.fixture(scope="module", params=["random-gqa", "random-mla"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(
        model=request.param,
        block_size=16,
        chunk_tokens=CHUNK,
        device_capacity="4MiB",
        threads=1,
        cache=CacheConfig(host_capacity="4MiB", strict=True),
    )
    with Engine(config) as running:
        yield running


def logits(engine: Engine) -> npt.NDArray[np.float32]:
    params = SamplingParams(max_tokens=2, ignore_eos=True, keep_logits=True)
    found = run_one(engine, PROMPT, params).logits
    assert found is not None
    return found


def contents(engine: Engine, tier: str) -> list[bytes]:
    """Bytes of all blocks of both prompts."""
    blocks = _Blocks(engine, tier)
    return engine.call(
        lambda: [
            blocks.read(slot).tobytes()
            for prompt in (PROMPT, OTHER)
            for slot in blocks.places(prompt)
        ]
    )


def expose(engine: Engine, tier: str) -> None:
    settle(engine)
    if tier == HOST:
        clear_tiers(engine, DEVICE)


@pytest.mark.parametrize("tier", [DEVICE, HOST])
@pytest.mark.parametrize("damage", list(Damage))
def test_damage_is_noticed_and_undone(engine: Engine, tier: str, damage: Damage) -> None:
    clear_tiers(engine, DEVICE, HOST)
    cold = logits(engine)
    run_one(engine, OTHER, SamplingParams(max_tokens=1, ignore_eos=True))
    expose(engine, tier)
    before = contents(engine, tier)
    with damaged(engine, tier, damage, PROMPT, OTHER, seed=7):
        spoilt = contents(engine, tier)
        assert np.any(logits(engine) != cold)
        settle(engine)
    changed = sum(one != another for one, another in zip(before, spoilt, strict=True))
    assert changed == (2 if damage is Damage.SWAPPED else 1)
    assert contents(engine, tier) == before
    expose(engine, tier)
    assert logits(engine).tobytes() == cold.tobytes()


def test_bytes_come_back_when_the_run_fails(engine: Engine) -> None:
    clear_tiers(engine, DEVICE, HOST)
    logits(engine)
    run_one(engine, OTHER, SamplingParams(max_tokens=1, ignore_eos=True))
    settle(engine)
    before = contents(engine, DEVICE)
    with (
        pytest.raises(RuntimeError, match="stop here"),
        damaged(engine, DEVICE, Damage.VALUE, PROMPT, OTHER, seed=1),
    ):
        raise RuntimeError("stop here")
    assert contents(engine, DEVICE) == before


def test_a_changed_value_is_one_value(engine: Engine) -> None:
    clear_tiers(engine, DEVICE, HOST)
    logits(engine)
    settle(engine)
    blocks = _Blocks(engine, DEVICE)

    def values() -> npt.NDArray[np.float32]:
        return np.stack([blocks.read(slot).view(np.float32) for slot in blocks.places(PROMPT)])

    before = engine.call(values)
    with damaged(engine, DEVICE, Damage.VALUE, PROMPT, OTHER, seed=3):
        spoilt = engine.call(values)
    ((block, at),) = np.argwhere(before != spoilt)
    assert spoilt[block, at] == -before[block, at] != 0


def test_an_empty_tier_has_nothing_to_damage(engine: Engine) -> None:
    clear_tiers(engine, DEVICE, HOST)
    with (
        pytest.raises(BenchError, match="nothing to damage"),
        damaged(engine, HOST, Damage.SWAPPED, PROMPT, OTHER, seed=0),
    ):
        pass
