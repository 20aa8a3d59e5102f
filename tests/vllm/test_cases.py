"""A real vLLM with kvtier: features of the engine that change what is computed, or in what order.

Each case asks for prompts from the engine's own pool, from host memory and disk after eviction, and
after a restart, and compares answers with their log-probabilities, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm

from tests.vllm.engines import BLOCK, count, engine, prompt, with_disk

NUM_BLOCKS = 5
FLOOD = [prompt(5200 + seed, 6 * BLOCK + 50) for seed in range(12)]
"""More than vLLM's pool and the host tier hold."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


def _repetitive(seed: int) -> dict[str, list[int]]:
    """A prompt in which the same tokens come again and again, for drafts from the prompt."""
    tokens = prompt(seed, 60)["prompt_token_ids"]
    return {"prompt_token_ids": (tokens * 12)[: NUM_BLOCKS * BLOCK + 50]}


PROMPTS: list[dict[str, Any]] = [_repetitive(seed) for seed in (5101, 5102)]

CASES: dict[str, dict[str, Any]] = {
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
}


def _ask(llm: Any, asked: dict[str, Any]) -> tuple[int, Any, tuple[float, float]]:
    """Return the tokens that were cached, the answers with log-probabilities, and the drafts."""
    before = count(DRAFTED), count(ACCEPTED)
    params = vllm.SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
    (output,) = llm.generate([asked], params, use_tqdm=False)
    answers = [
        (list(each.token_ids), [_plain(step) for step in each.logprobs]) for each in output.outputs
    ]
    drafts = count(DRAFTED) - before[0], count(ACCEPTED) - before[1]
    return output.num_cached_tokens, answers, drafts


def _plain(step: dict[int, Any]) -> dict[int, float]:
    return {token: each.logprob for token, each in sorted(step.items())}


def _flood(llm: Any) -> None:
    """Evict everything from vLLM's pool and from host memory, and have it written."""
    params = vllm.SamplingParams(max_tokens=1)
    for each in FLOOD:
        llm.generate([each], params, use_tqdm=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_case_is_served_after_eviction_and_after_a_restart(case: str, tmp_path: Path) -> None:
    options = CASES[case]
    config = with_disk(tmp_path, host_capacity="24MiB", eviction_policy="lru")
    with engine(config, **options) as llm:
        cold = [_ask(llm, each) for each in PROMPTS]
        assert [cached for cached, *_ in cold] == [0, 0]
        warm = [_ask(llm, each) for each in PROMPTS]
        assert all(cached >= NUM_BLOCKS * BLOCK for cached, *_ in warm), "vLLM's own hit"
        assert llm.reset_prefix_cache()
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from host memory"
        _flood(llm)
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from disk, after eviction"
    with engine(config, **options) as llm:
        assert [_ask(llm, each) for each in PROMPTS] == warm, "from disk, after a restart"
    for (_, _, drafts), (_, _, of_cold) in zip(warm, cold, strict=True):
        assert drafts == of_cold, "as many drafts are made and accepted as in a cold run"
        assert bool(drafts[0]) == ("speculative_config" in options)
