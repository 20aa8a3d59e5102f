"""The damage of the negative control is real, noticed, and undone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, HOST
from kvtier.layout import part_view
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from kvtier.tools.bench_serve.engines import clear_tiers, run_one, settle
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.bench_serve.tamper import Blocks, Damage, damaged

pytestmark = pytest.mark.engine

CHUNK = 32
PROMPT = tuple(range(100, 100 + 4 * CHUNK + 5))
OTHER = tuple(range(1000, 1000 + 3 * CHUNK))


@pytest.fixture(
    scope="module",
    params=[("random-gqa", "float32"), ("random-gqa", "bfloat16"), ("random-mla", "float32")],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    model, dtype = request.param
    config = EngineConfig(
        model=model,
        dtype=dtype,
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
    """Return the bytes of all blocks of both prompts."""
    blocks = Blocks(engine, tier)
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
    assert changed == 1
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
        damaged(engine, DEVICE, Damage.TOKEN, PROMPT, OTHER, seed=1),
    ):
        raise RuntimeError("stop here")
    assert contents(engine, DEVICE) == before


def test_a_wrong_token_is_one_token_of_one_block(engine: Engine) -> None:
    clear_tiers(engine, DEVICE, HOST)
    logits(engine)
    settle(engine)
    blocks = Blocks(engine, DEVICE)
    group = blocks.layout.group

    def tokens() -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of each part of all blocks: [block, layer, token, head, byte]."""
        content = [blocks.read(slot) for slot in blocks.places(PROMPT)]
        return [
            np.stack([part_view(each, blocks.layout, part)[0].view(np.uint8) for each in content])
            for part in range(len(group.parts))
        ]

    before = engine.call(tokens)
    with damaged(engine, DEVICE, Damage.TOKEN, PROMPT, OTHER, seed=3):
        spoilt = engine.call(tokens)
    signs = np.zeros(group.dtype.itemsize, np.uint8)
    signs[-1] = 0x80
    places = set()
    for one, another in zip(before, spoilt, strict=True):
        changed = (one ^ another).reshape(*one.shape[:4], -1, len(signs))
        for block, token in np.argwhere(changed.any(axis=(1, 3, 4, 5))).tolist():
            places.add((block, token))
            assert (changed[block, :, token] == signs).all()
    assert len(places) == 1


def test_an_empty_tier_has_nothing_to_damage(engine: Engine) -> None:
    clear_tiers(engine, DEVICE, HOST)
    with (
        pytest.raises(BenchError, match="nothing to damage"),
        damaged(engine, HOST, Damage.REPEATED, PROMPT, OTHER, seed=0),
    ):
        pass
