"""Hints of requests, and the KV that the engine retains for waiting requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.hints import Hint, Retain
from kvtier.core.types import DEVICE, HOST
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from kvtier.serve.engine.waiting import Hints

from .conftest import changed

pytestmark = pytest.mark.engine

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
TALK = [7] * 230
"""Seven cells of the grid, 14 blocks: a quarter of the host tier."""
HOST_BLOCKS = 56
BLOCK_BYTES = 24 << 10

Make = Callable[[EngineConfig], Engine]


@pytest.fixture
def engine(make: Make) -> Engine:
    made = make(changed(host=HOST_BLOCKS * BLOCK_BYTES, max_running=1))
    assert made.info.bytes_per_block == BLOCK_BYTES
    return made


def serve(engine: Engine, prompt: list[int], hint: Hint | None = None) -> dict[str, int]:
    """Serve a prompt. Return its numbers of found tokens, by tier."""
    completion = engine.submit(prompt, ONE, hint=hint).result(60)
    assert not completion.error
    assert engine.drain()
    return dict(completion.hit_tokens)


def flood(engine: Engine, first: int = 50, num_prompts: int = 12) -> None:
    for token in range(first, first + num_prompts):
        serve(engine, [token] * 100)
    engine.clear_tier(DEVICE)


@pytest.mark.parametrize(
    ("hint", "found"),
    [
        (None, 0),
        (Hint(back_in_s=600), 224),
        (Hint(retain=(Retain(90),)), 224),
        (Hint(retain=(Retain(90, last_token=100),)), 96),
    ],
    ids=["nothing", "back", "priority", "range"],
)
def test_a_flood_of_other_prompts_leaves_what_a_request_said_it_will_want(
    engine: Engine, hint: Hint | None, found: int
) -> None:
    serve(engine, TALK, hint)
    flood(engine)
    assert serve(engine, TALK).get(HOST, 0) == found


def test_what_an_ended_session_had_leaves_first(engine: Engine) -> None:
    old, ended = [8] * 230, [9] * 230
    serve(engine, old)
    serve(engine, ended, Hint(ended=True))
    flood(engine, num_prompts=6)
    assert serve(engine, old).get(HOST) == 224
    assert serve(engine, ended).get(HOST, 0) < 224


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_waiting_request_needs_is_there_when_its_turn_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    engine = make(changed(host=36 * BLOCK_BYTES, max_running=1))
    if not is_told:  # negative control
        monkeypatch.setattr(Hints, "tell_who_waits", lambda self: None)
    serve(engine, TALK)
    engine.clear_tier(DEVICE)
    waiting, others = engine.call(
        lambda: (  # all at once, the long one first; the others overtake it
            engine.submit(TALK[:224] + [6] * 600, ONE),
            [engine.submit([token] * 100, ONE) for token in range(20, 28)],
        )
    )
    completion = waiting.result(60)
    assert all(other.done for other in others)
    assert completion.hit_tokens.get(HOST, 0) == (224 if is_told else 0)
    assert engine.drain()
    flood(engine)
    assert serve(engine, TALK).get(HOST, 0) == 0, "it waits no more"


def test_a_request_that_goes_before_its_turn_waits_no_more(engine: Engine) -> None:
    serve(engine, TALK)
    engine.clear_tier(DEVICE)
    running, handle = engine.call(
        lambda: (
            engine.submit([3] * 40, SamplingParams(max_tokens=2000, ignore_eos=True)),
            engine.submit(TALK[:224] + [6] * 600, ONE),
        )
    )
    handle.abort()
    assert handle.result(60).finish_reason == "abort"
    running.abort()
    running.result(60)
    flood(engine)
    assert serve(engine, TALK).get(HOST, 0) == 0
