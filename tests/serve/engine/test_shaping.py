"""Penalties, biases, minimum length and ``min_p``, each against a plain computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier.serve.engine import Engine, SamplingParams
from kvtier.serve.engine.sampling import Sampler, choose

pytestmark = pytest.mark.engine

VOCAB = 96
PROMPT = [3, 4, 4, 9]
OUTPUT = [5, 5, 9]
ENDS = frozenset({1, 2})


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def shaped(logits: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return the shaped logits after ``OUTPUT`` was generated."""
    shaper = SamplingParams(max_tokens=50, **given).shaper(PROMPT, ENDS, VOCAB)
    assert shaper is not None
    for token_id in OUTPUT:
        shaper.accept(token_id)
    return shaper.shape(logits)


def test_a_request_without_any_has_no_shaper() -> None:
    plain = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=(4,), seed=1)
    assert plain.shaper(PROMPT, ENDS, VOCAB) is None
    assert replace(plain, temperature=0, min_p=0.5).shaper(PROMPT, ENDS, VOCAB) is None


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = logits_of(1)[0]
    expected = logits.clone()
    expected[5] -= 2 * 0.5 + 1.5
    expected[9] -= 0.5 + 1.5
    found = shaped(logits, frequency_penalty=0.5, presence_penalty=1.5)
    assert torch.equal(found, expected)


def test_repetition_counts_prompt_and_answer() -> None:
    logits = logits_of(2)[0]
    expected = logits.clone()
    for token_id in {*PROMPT, *OUTPUT}:
        value = float(logits[token_id])
        expected[token_id] = value / 1.3 if value > 0 else value * 1.3
    torch.testing.assert_close(shaped(logits, repetition_penalty=1.3), expected)


def test_repetition_equals_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(3)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([PROMPT + OUTPUT]), logits)
    torch.testing.assert_close(shaped(logits[0], repetition_penalty=1.7), expected[0])


def test_biases_are_added_and_may_name_a_token_twice() -> None:
    logits = logits_of(4)[0]
    expected = logits.clone()
    expected[7] += 3
    expected[0] -= 100
    assert torch.equal(shaped(logits, logit_bias=((7, 1), (0, -100), (7, 2))), expected)


@pytest.mark.parametrize(("min_tokens", "is_banned"), [(3, False), (4, True)])
def test_ends_are_banned_before_the_least_length(min_tokens: int, is_banned: bool) -> None:
    found = shaped(logits_of(5)[0], min_tokens=min_tokens)
    assert [bool(found[end].isinf()) for end in sorted(ENDS)] == [is_banned] * 2
    assert int(found.isinf().sum()) == 2 * is_banned


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p: float) -> None:
    logits = logits_of(6)[0]
    probabilities = (logits / 0.8).softmax(-1)
    expected = probabilities >= min_p * probabilities.max() * (1 - 1e-6)
    found = shaped(logits, temperature=0.8, min_p=min_p)
    assert torch.equal(~found.isinf(), expected)
    assert 0 < int(expected.sum()) < VOCAB


def test_min_p_equals_that_of_transformers() -> None:
    from transformers import MinPLogitsWarper

    logits = logits_of(7)
    warper: Any = MinPLogitsWarper(0.05)
    expected = warper(torch.tensor([PROMPT]), logits / 0.6)[0]
    found = shaped(logits[0], temperature=0.6, min_p=0.05)
    assert torch.equal(found.isinf(), expected.isinf())


def test_a_shaped_request_changes_no_other_in_its_batch() -> None:
    logits = logits_of(8, rows=4)
    before = logits.clone()
    plain = SamplingParams(max_tokens=9)
    sampled = replace(plain, temperature=1.0, seed=3)
    biased = replace(plain, logit_bias=((11, 100.0),))
    both = replace(sampled, logit_bias=((12, 100.0),))
    asked = [plain, biased, sampled, both]
    samplers = [Sampler(each, each.shaper(PROMPT, ENDS, VOCAB)) for each in asked]
    found = choose(logits, samplers)
    alone = [choose(logits[at][None], [Sampler(asked[at])])[0] for at in (0, 2)]
    assert found == [alone[0], 11, alone[1], 12]
    assert torch.equal(logits, before)


def test_penalties_reach_the_answer_and_logprobs_do_not_show_them(tiny: Engine) -> None:
    prompt = tiny.tokenizer.encode("def f(x):\n    return x\n" * 3)
    plain = SamplingParams(max_tokens=12, ignore_eos=True, num_logprobs=1)
    first = tiny.submit(prompt, plain).result(60)
    best = first.token_ids[0]
    banned = tiny.submit(prompt, replace(plain, logit_bias=((best, -100.0),))).result(60)
    assert best not in banned.token_ids
    assert banned.tokens[0].top_logprobs == first.tokens[0].top_logprobs
    assert tiny.submit(prompt, plain).result(60).token_ids == first.token_ids


def test_a_stop_token_ends_the_answer_and_the_least_length_puts_it_off(tiny: Engine) -> None:
    prompt = tiny.tokenizer.encode("import os\n")
    plain = SamplingParams(max_tokens=10, ignore_eos=True)
    tokens = tiny.submit(prompt, plain).result(60).token_ids
    stop = tokens[2]
    at = tokens.index(stop)
    asked = replace(plain, stop_token_ids=(stop,))
    stopped = tiny.submit(prompt, asked).result(60)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: at + 1], "stop")
    later = tiny.submit(prompt, replace(asked, min_tokens=6)).result(60)
    assert stop not in later.token_ids[:6]
    assert len(later.token_ids) >= 6


@pytest.mark.parametrize("penalties", [{}, {"min_p": 0.02, "repetition_penalty": 1.2}])
def test_a_seed_gives_the_same_choices(tiny: Engine, penalties: dict[str, Any]) -> None:
    prompt = tiny.tokenizer.encode("class Node:\n")
    asked = SamplingParams(max_tokens=24, temperature=1.2, seed=5, ignore_eos=True, **penalties)
    found = [tiny.submit(prompt, asked).result(60).token_ids for _ in range(2)]
    assert found[0] == found[1]
    assert tiny.submit(prompt, replace(asked, seed=6)).result(60).token_ids != found[0]


def test_no_tokens_computes_the_prompt_only(tiny: Engine) -> None:
    prompt = [at % 90 + 10 for at in range(300)]
    first = tiny.submit(prompt, SamplingParams(max_tokens=0)).result(60)
    assert (first.token_ids, first.finish_reason) == ((), "length")
    again = tiny.submit(prompt, SamplingParams(max_tokens=1)).result(60)
    assert again.num_cached_tokens == 300 // tiny.info.chunk_tokens * tiny.info.chunk_tokens
