"""The order of requests, counted in steps: short prompts pass long ones, which still finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.tokens import Cache
from kvtier.core.types import PrefetchPolicy
from kvtier.serve.engine import Engine, RequestHandle, SamplingParams
from kvtier.serve.engine.request import Request, Stage
from kvtier.serve.engine.sampling import Sampler
from kvtier.serve.engine.scheduler import PROMPT_TOKENS
from kvtier.serve.engine.waiting import PATIENCE, RequestLine

from .conftest import changed

pytestmark = pytest.mark.engine

CHUNK = 32
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Driven:
    """An engine whose steps the test runs; every prompt is different."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine._scheduler
        self.first_tokens: list[str] = []
        self.num_steps = 0
        self._num_prompts = 0

    def submit(self, name: str, num_tokens: int, params: SamplingParams = ONE) -> RequestHandle:
        self._num_prompts += 1
        prompt = [5 + self._num_prompts] * num_tokens

        def note(_: object) -> None:
            if name not in self.first_tokens:
                self.first_tokens.append(name)

        return self.engine.submit(prompt, params, on_token=note)

    def step(self) -> None:
        self.engine._take_in(wait=False)
        self.scheduler.step()
        self.num_steps += 1

    def until(self, name: str) -> int:
        """Run steps until the first token of ``name``. Return their number."""
        before = self.num_steps
        while name not in self.first_tokens:
            assert self.num_steps < before + 3000, f"{name} never comes"
            self.step()
        return self.num_steps - before


@pytest.fixture
def driven() -> Iterator[Driven]:
    engine = Engine(changed(max_running=64, device_capacity="16MiB"))
    yield Driven(engine)
    engine.close()


def test_prompts_of_one_length_come_in_order(driven: Driven) -> None:
    names = [str(at) for at in range(20)]
    for name in names:
        driven.submit(name, 2 * CHUNK + 5)
    driven.until("19")
    assert driven.first_tokens == names


def test_a_short_prompt_passes_long_ones_that_are_being_computed(driven: Driven) -> None:
    for name in "abc":
        driven.submit(name, 20 * CHUNK)
    driven.step()
    driven.submit("short", 10)
    assert driven.until("short") <= 2
    assert driven.until("c") <= 3 * 20 + 2


def test_a_long_prompt_is_passed_by_no_more_than_its_patience(driven: Driven) -> None:
    num_chunks = 12
    long = driven.submit("long", num_chunks * CHUNK)
    num_passed = 0
    while not long.done:
        driven.submit(f"short {num_passed}", CHUNK)  # as many tokens as a step can compute
        driven.step()
        num_passed += 1
        assert num_passed < 1000, "the long one never comes"
    assert PATIENCE * (num_chunks - 2) <= num_passed <= (PATIENCE + 1) * num_chunks + 2


def test_one_that_generates_gets_a_token_between_two_chunks(driven: Driven) -> None:
    forever = replace(ONE, max_tokens=100)
    handle = driven.submit("generating", 10, forever)
    driven.until("generating")
    driven.submit("long", 30 * CHUNK)
    request = driven.scheduler.running[0]
    before = len(request.tokens)
    steps = driven.until("long")
    assert steps >= 30
    assert len(request.tokens) - before == steps
    handle.abort()


def test_prompts_get_more_of_a_step_the_more_generate(driven: Driven) -> None:
    forever = replace(ONE, max_tokens=60)
    for at in range(40):
        driven.submit(f"generating {at}", 10, forever)
    driven.until("generating 39")
    num_chunks = 30
    driven.submit("long", num_chunks * CHUNK)
    chunks_per_step = -(-PROMPT_TOKENS * 40 // CHUNK)
    assert driven.until("long") <= num_chunks // chunks_per_step + 2


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT])
def test_a_waiting_request_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, policy: PrefetchPolicy
) -> None:
    """A step calls the cache as often with 500 waiting requests as with five."""
    calls: Counter[str] = Counter()
    for name in ("match", "fetch", "prefetch", "plan", "lease"):
        original = getattr(Cache, name)

        def counted(
            cache: Cache,
            *args: object,
            original: Any = original,
            name: str = name,
            **options: object,
        ) -> object:
            calls[name] += 1
            return original(cache, *args, **options)

        monkeypatch.setattr(Cache, name, counted)

    def calls_of_steps(num_waiting: int) -> list[dict[str, int]]:
        config = changed(max_running=2)
        config = replace(config, cache=replace(config.cache, prefetch_policy=policy))
        driven = Driven(Engine(config))
        for at in range(num_waiting):
            driven.submit(str(at), 20, replace(ONE, max_tokens=100))
        driven.step()  # this step looks up every new request once
        found = []
        for _ in range(20):
            calls.clear()
            driven.step()
            found.append(dict(calls))
        driven.engine.close()
        return found

    assert calls_of_steps(500) == calls_of_steps(5)


def test_an_abort_finds_its_request_wherever_it_waits(driven: Driven) -> None:
    some = replace(ONE, max_tokens=6)
    handles = [driven.submit(str(at), 20, some) for at in range(100)]
    driven.step()
    for handle in handles[10::7]:
        handle.abort()
    driven.step()
    assert {handle.result(0).finish_reason for handle in handles[10::7]} == {"abort"}
    while not all(handle.done for handle in handles):
        driven.step()
    assert not driven.scheduler.has_requests


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.data())
def test_the_line_is_sorted_and_nobody_is_lost(lengths: list[int], data: st.DataObject) -> None:
    line = RequestLine()
    inside: set[Request] = set()
    for length in lengths:
        request = make_request(length)
        line.join(request, length)
        inside.add(request)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(inside, key=lambda each: each.turn)))
            assert line.leave(gone)
            assert not line.leave(gone)
            inside.discard(gone)
            if data.draw(st.booleans()):
                line.rejoin(gone)
                inside.add(gone)
        if not inside:
            break
        assert set(line) == inside
        assert len(line) == len(inside)
        assert line.first is min(inside, key=lambda each: each.turn)


def make_request(length: int) -> Request:
    params = SamplingParams()
    request = Request([5] * length, params, "", (), None, None, Sampler(params))
    assert request.stage is Stage.WAITING
    return request
