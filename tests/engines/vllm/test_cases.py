"""A real vLLM with kvtier: features of the engine that change what is computed, or in what order.

Each prompt is served from the engine's own pool, from host memory and disk after eviction, and
after a restart. Answers with their log-probabilities are equal to those of the engine's own hit,
bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import vllm

from tests.engines.vllm.drafts import make_eagle, make_mtp
from tests.engines.vllm.engines import (
    BLOCK,
    DIFFERENT,
    MODEL,
    connector,
    count,
    engine,
    multi,
    prompt,
    with_disk,
)

NUM_BLOCKS = 5
FLOOD = [prompt(5200 + seed, 6 * BLOCK + 50) for seed in range(12)]
"""More than vLLM's pool and the host tier hold."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
PREEMPTED = "vllm:num_preemptions_total"


def _repetitive(seed: int) -> dict[str, Any]:
    """Return a prompt that repeats its tokens, for drafts from the prompt."""
    tokens = prompt(seed, 60)["prompt_token_ids"]
    return {"prompt_token_ids": (tokens * 12)[: NUM_BLOCKS * BLOCK + 50]}


PROMPTS = [_repetitive(seed) for seed in (5101, 5102)]


class Asked(NamedTuple):
    """cached: number of cached tokens. drafts: numbers of drafted and of accepted tokens."""

    cached: int
    answers: list[Any]
    drafts: tuple[float, float]


def _ask(llm: Any, asked: dict[str, Any], **more: Any) -> Asked:
    """Return all answers, and log-probabilities of answers and prompt."""
    before = count(DRAFTED), count(ACCEPTED)
    given = {"max_tokens": 12, "temperature": 0, "logprobs": 3, "ignore_eos": True, **more}
    (output,) = llm.generate([asked], vllm.SamplingParams(**given), use_tqdm=False)
    answers = [[list(each.token_ids), *map(_plain, each.logprobs)] for each in output.outputs]
    if output.prompt_logprobs is not None:
        answers.append([each and _plain(each) for each in output.prompt_logprobs])
    drafts = count(DRAFTED) - before[0], count(ACCEPTED) - before[1]
    return Asked(output.num_cached_tokens, answers, drafts)


def _plain(step: dict[int, Any]) -> dict[int, float]:
    return {token: each.logprob for token, each in sorted(step.items())}


def _flood(llm: Any) -> None:
    """Evict everything from vLLM's pool and from host memory, and wait until it is written."""
    params = vllm.SamplingParams(max_tokens=1)
    for each in FLOOD:
        llm.generate([each], params, use_tqdm=False)


def _small_host(slab: Path) -> dict[str, Any]:
    return with_disk(slab, host_capacity="24MiB", eviction_policy="lru")


def _drafting(method: str, model: Path | None = None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": str(model)}
    return {"speculative_config": {"method": method, **named, **more}}


def _case(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model and options of vLLM."""
    if name == "mtp":
        return make_mtp(folder / "mtp"), _drafting("mtp", num_speculative_tokens=1)
    if name == "eagle":
        head = make_eagle(folder / "eagle")
        return MODEL, _drafting("eagle", head, num_speculative_tokens=2)
    if name == "draft model":
        return MODEL, _drafting("draft_model", MODEL, num_speculative_tokens=2)
    if name == "ngram":
        lookup: dict[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        return MODEL, _drafting("ngram", num_speculative_tokens=3, **lookup)
    if name == "bfloat16":
        return MODEL, {"dtype": name}
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM: FP8 KV cache on CPU requires x86 with AVX-512 or AMX")
    return MODEL, {"dtype": "bfloat16", "kv_cache_dtype": name}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", ["ngram", "draft model", "eagle", "mtp", "bfloat16", "fp8", "fp8_e5m2"]
)
def test_case_is_served_after_eviction_and_after_a_restart(case: str, tmp_path: Path) -> None:
    model, options = _case(case, tmp_path)
    config = _small_host(tmp_path / "slab")
    with engine(config, model, **options) as llm:
        cold = [_ask(llm, each) for each in PROMPTS]
        assert [each.cached for each in cold] == [0, 0]
        warm = [_ask(llm, each) for each in PROMPTS]
        # The state behind the last block is computed again for some drafts.
        assert all(each.cached >= (NUM_BLOCKS - 1) * BLOCK for each in warm), "vLLM's own hit"
        assert llm.reset_prefix_cache()
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from host memory"
        _flood(llm)
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from disk, after eviction"
    with engine(config, model, **options) as llm:
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from disk, after a restart"
    for found, computed in zip(warm, cold, strict=True):
        assert found.drafts == computed.drafts, "drafts are accepted as in a cold run"
        assert bool(found.drafts[0]) == ("speculative_config" in options)
    if case in ("draft model", "eagle", "mtp"):
        assert sum(each.drafts[1] for each in cold) > 0, "or wrong KV of drafts would not show"


def _embedded(seed: int) -> dict[str, Any]:
    hidden = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    made = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(NUM_BLOCKS * BLOCK + 50, hidden, generator=made)}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several answers": (PROMPTS[0], {"n": 3, "temperature": 1.0, "seed": 7}),
    "log-probabilities of the prompt": (PROMPTS[0], {"prompt_logprobs": 2}),
    "embeddings": (_embedded(1), {}),
}


@pytest.mark.timeout(900)
def test_requests_of_every_kind(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_prompt_embeds": True, "async_scheduling": True}
    config = with_disk(tmp_path, host_capacity="64MiB", eviction_policy="lru")
    with engine(config, **options) as llm:
        assert _ask(llm, PROMPTS[0]).cached == 0
        assert _ask(llm, _embedded(1)).cached == 0
        warm = {kind: _ask(llm, asked, **more) for kind, (asked, more) in KINDS.items()}
        found = [each.cached for each in warm.values()]
        assert found == [NUM_BLOCKS * BLOCK, 0, NUM_BLOCKS * BLOCK], "vLLM computes the second one"
        (_, scored) = warm["log-probabilities of the prompt"].answers
        assert len(scored) == NUM_BLOCKS * BLOCK + 50
        assert all(scored[1:])
        for kind, (asked, more) in KINDS.items():
            assert llm.reset_prefix_cache()
            assert _ask(llm, asked, **more) == warm[kind], f"{kind}: from host memory"
        assert llm.reset_prefix_cache()
        other = _embedded(1)
        other["prompt_embeds"][0, 0] += 1
        found_for_other = _ask(llm, other)
        assert found_for_other.cached == 0
        assert found_for_other.answers != warm["embeddings"].answers
        _crowd(llm)
    del warm["embeddings"]
    options["async_scheduling"] = False
    with engine(config, **options) as llm:
        for kind, expected in warm.items():
            asked, more = KINDS[kind]
            assert _ask(llm, asked, **more) == expected, f"{kind}: after a restart"
            assert llm.reset_prefix_cache()
        _crowd(llm)


def _crowd(llm: Any) -> None:
    """Run so many prompts at a time that requests are preempted, twice, and each prompt alone."""
    many = vllm.SamplingParams(max_tokens=60, temperature=0, logprobs=3, ignore_eos=True)
    prompts: list[Any] = [prompt(5300 + seed, NUM_BLOCKS * BLOCK + 100) for seed in range(11)]
    before = count(PREEMPTED)
    together = llm.generate(prompts, many, use_tqdm=False)
    assert count(PREEMPTED) > before, "or the test would not notice"
    assert llm.reset_prefix_cache()
    again = llm.generate(prompts, many, use_tqdm=False)
    assert all(each.num_cached_tokens > 0 for each in again)
    for number, asked in enumerate(prompts):
        ((tokens, *steps),) = _ask(llm, asked, max_tokens=60).answers
        for each in (together[number], again[number]):
            _agree(tokens, steps, each.outputs[0])


def _agree(tokens: list[int], steps: list[dict[int, float]], other: Any) -> None:
    """Compare answers of other batches: sums come out in another order, up to a tie of tokens."""
    for token, step, other_token, given in zip(
        tokens, steps, other.token_ids, other.logprobs, strict=True
    ):
        other_step = _plain(given)
        for each in step.keys() & other_step.keys():
            assert abs(step[each] - other_step[each]) < DIFFERENT
        if token != other_token:
            assert abs(step[token] - step[other_token]) < DIFFERENT
            return


def _role(config: dict[str, Any], role: str) -> dict[str, Any]:
    return {**config, "kv_role": role}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["roles", "inside MultiConnector"])
def test_another_connector_or_role_finds_what_the_first_has_stored(
    tmp_path: Path, kind: str
) -> None:
    """A prefill engine stores for a decode engine; the connector alone, and inside another."""
    alone = with_disk(tmp_path)
    first, second = alone, multi(alone, connector(host_capacity="8MiB"))
    if kind == "roles":
        first, second = _role(alone, "kv_producer"), _role(alone, "kv_consumer")
    with engine(first) as llm:
        for each in PROMPTS:
            _ask(llm, each)
        warm = [_ask(llm, each) for each in PROMPTS]
        _flood(llm)
    with engine(second) as llm:
        assert [_ask(llm, each) for each in PROMPTS] == warm
