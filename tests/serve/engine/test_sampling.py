"""Sampling: each row is independent of the other rows of its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.serve.engine import SamplingParams
from kvtier.serve.engine.sampling import (
    NO_TOKEN,
    TILE_LOGITS,
    Sampler,
    choose,
    logprobs,
    most_likely,
)

pytestmark = pytest.mark.engine

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 90, 10**6]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999999, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)


def random_logits(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def nucleus(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """Return the tokens that may be sampled, most likely first, by sorting all of them."""
    ordered = (logits / params.temperature).sort(descending=True, stable=True)
    values = ordered.values
    if 0 < params.top_k < len(values):
        values = values[values >= values[params.top_k - 1]]
    sums = values.softmax(-1).double().cumsum(-1)
    num_kept = int((sums < params.top_p - 1e-7).sum()) + 1
    return ordered.indices[:num_kept].tolist()


@given(st.lists(PARAMS, min_size=1, max_size=9), st.integers(0, 2**32), st.floats(0.1, 20.0))
def test_a_row_gets_the_same_tokens_in_any_company(
    params: list[SamplingParams], seed: int, spread: float
) -> None:
    together = [Sampler(param) for param in params]
    alone = [Sampler(param) for param in params]
    for step in range(3):
        logits = random_logits(len(params), 100, seed=seed + step, spread=spread)
        tokens = choose(logits, together)
        single = [
            choose(row[None], [sampler])[0] for row, sampler in zip(logits, alone, strict=True)
        ]
        assert tokens == single


def test_rows_of_several_tiles_get_what_they_get_alone() -> None:
    logits = random_logits(5, TILE_LOGITS // 2, spread=3.0)
    params = SamplingParams(temperature=0.9, top_p=0.8, top_k=5000)
    seeds = [replace(params, seed=seed) for seed in range(5)]
    tokens = choose(logits, [Sampler(seed) for seed in seeds])
    alone = [choose(row[None], [Sampler(seed)])[0] for row, seed in zip(logits, seeds, strict=True)]
    assert tokens == alone


@given(PARAMS.filter(lambda each: each.temperature > 0), st.integers(0, 2**32))
def test_sampling_stays_within_top_k_and_top_p(params: SamplingParams, seed: int) -> None:
    logits = random_logits(100, seed=seed)
    chosen = choose(logits[None], [Sampler(params)])[0]
    assert chosen in nucleus(logits, params)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_tokens_come_as_often_as_they_are_likely(top_p: float, spread: float) -> None:
    """Therefore every allowed token is sampled, too."""
    logits = random_logits(20, seed=3, spread=spread)
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=11)
    sampler, num_drawn = Sampler(params), 4000
    counts = torch.zeros(20)
    for first in range(0, num_drawn, 100):
        assert first < num_drawn
        for _ in range(100):
            counts[choose(logits[None], [sampler])[0]] += 1
    kept = nucleus(logits, params)
    expected = torch.zeros(20)
    expected[kept] = logits[kept].softmax(-1)
    assert (counts / num_drawn - expected).abs().max() < 0.04
    assert set(counts.nonzero()[:, 0].tolist()) <= set(kept)


def test_equal_logits_leave_the_first_tokens() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.25)
    chosen = {choose(torch.zeros(1, 64), [Sampler(params)])[0] for _ in range(500)}
    assert chosen == set(range(16))


@pytest.mark.parametrize("shape", [(1, 128), (3, 4096), (5, 8192), (7, 5000), (1, 131_072)])
def test_the_most_likely_token_is_the_first_maximum(shape: tuple[int, int]) -> None:
    made = torch.Generator().manual_seed(shape[0])
    logits = torch.randn(shape, generator=made)
    for found in (
        logits,
        logits.round(),  # many are equal
        torch.zeros(shape),
        torch.full(shape, float("-inf")),
        logits.log(),  # some are NaN
    ):
        assert torch.equal(most_likely(found), found.argmax(-1))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=1e-46),
        SamplingParams(temperature=100.0, top_p=5e-324),
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=5e-324, top_p=1e-46),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1.0, top_k=1, seed=2**70),
    ],
)
def test_extremes_of_sampling_give_the_likeliest_token(params: SamplingParams) -> None:
    logits = random_logits(1, 100, spread=100.0)
    assert params.complaint() == ""
    assert choose(logits, [Sampler(params)]) == [int(logits.argmax())]


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_that_are_no_numbers_cost_their_own_row_only(top_p: float, sign: float) -> None:
    logits = random_logits(3, 50)
    logits[1] = sign * float("nan")
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=5)
    tokens = choose(logits, [Sampler(params) for _ in range(3)])
    assert tokens[1] == NO_TOKEN
    assert tokens[0] == choose(logits[:1], [Sampler(params)])[0]
    assert min(tokens[0], tokens[2]) >= 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    value, top = logprobs(logits, 2, 2)
    expected = logits.log_softmax(-1)
    assert value == float(expected[2])
    assert top == ((1, float(expected[1])), (2, float(expected[2])))
