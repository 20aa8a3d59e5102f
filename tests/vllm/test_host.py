"""A real vLLM on the CPU with kvtier behind its OffloadingConnector: the host tier.

Needs an environment with vLLM, kvtier and pytest: ``make test-vllm``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import kvtier  # noqa: E402

MODEL = Path(kvtier.__file__).parent / "engine/builtin/kvtier-tiny"
BLOCK = 128
"""vLLM's block size on the CPU, in tokens."""
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"spec_name": "kvtier", "host": "256MiB"},
}


@contextmanager
def _serve(**changes: Any) -> Iterator[Any]:
    """A vLLM with kvtier under it, and room for 64 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        made = vllm.LLM(
            str(MODEL),
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=4096,
            num_gpu_blocks_override=64,
            kv_transfer_config=vllm.config.KVTransferConfig(**CONNECTOR),
            **changes,
        )
        try:
            yield made
        finally:
            made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with _serve() as made:
        yield made


def _prompt(seed: int, num_tokens: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(10, 4000) for _ in range(num_tokens)]}


def _run(llm: Any, *prompts: dict[str, list[int]]) -> list[tuple[int, list[Any]]]:
    """Per prompt the tokens that were cached, and what was generated, with its logprobs."""
    params = vllm.SamplingParams(max_tokens=6, temperature=0, logprobs=4, ignore_eos=True)
    found = []
    for output in llm.generate(list(prompts), params, use_tqdm=False):
        (answer,) = output.outputs
        steps = [
            {token: each.logprob for token, each in sorted(step.items())}
            for step in answer.logprobs
        ]
        found.append((output.num_cached_tokens, [answer.token_ids, steps]))
    return found


def test_kv_from_host_memory_gives_the_logprobs_of_a_device_hit(llm: Any) -> None:
    # 50 tokens beyond the last full block: both hits are computed from the same boundary.
    prompts = [_prompt(seed, 9 * BLOCK + 50) for seed in range(3)]
    (_, first), *_ = _run(llm, *prompts)
    on_device = [_run(llm, prompt)[0] for prompt in prompts]
    assert [cached for cached, _ in on_device] == [9 * BLOCK] * 3
    assert llm.reset_prefix_cache()
    from_host = [_run(llm, prompt)[0] for prompt in prompts]
    assert [cached for cached, _ in from_host] == [9 * BLOCK] * 3
    assert from_host == on_device
    assert first[0] == from_host[0][1][0], "the same tokens as when it was computed"


def test_many_prompts_at_once_that_share_a_prefix(llm: Any) -> None:
    shared = _prompt(77, 5 * BLOCK)["prompt_token_ids"]
    prompts = [
        {"prompt_token_ids": shared + _prompt(100 + each, 2 * BLOCK + 30)["prompt_token_ids"]}
        for each in range(6)
    ]
    _run(llm, *prompts)
    alone = [_run(llm, prompt)[0] for prompt in prompts]
    assert llm.reset_prefix_cache()
    again = [_run(llm, prompt)[0] for prompt in prompts]
    assert [cached for cached, _ in again] == [7 * BLOCK] * 6
    assert again == alone


def test_prompts_beyond_the_device_pool_come_back_from_the_host(llm: Any) -> None:
    prompts = [_prompt(1000 + seed, 6 * BLOCK + 20) for seed in range(14)]  # 98 blocks in 64
    cold = [_run(llm, prompt)[0] for prompt in prompts]
    assert [cached for cached, _ in cold] == [0] * 14
    warm = [_run(llm, prompt)[0] for prompt in prompts]
    assert [cached for cached, _ in warm] == [6 * BLOCK] * 14
    for (_, before), (_, after) in zip(cold, warm, strict=True):
        assert before[0] == after[0]


def test_emptied_cache_is_empty_and_fills_again(llm: Any) -> None:
    prompt = _prompt(5000, 3 * BLOCK + 50)
    _run(llm, prompt)
    assert llm.reset_prefix_cache(reset_connector=True)
    for cached in (0, 3 * BLOCK):
        assert _run(llm, prompt)[0][0] == cached
        assert llm.reset_prefix_cache()


def test_two_ranks_keep_their_shards_in_the_same_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has half of the heads; the scheduler decides once for both."""
    # vLLM wants a NUMA node for each rank, unless it is told which cores to take.
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    with _serve(tensor_parallel_size=2) as llm:
        prompts = [_prompt(seed, 4 * BLOCK + 50) for seed in range(3)]
        _run(llm, *prompts)
        on_device = [_run(llm, prompt)[0] for prompt in prompts]
        assert llm.reset_prefix_cache()
        from_host = [_run(llm, prompt)[0] for prompt in prompts]
        assert [cached for cached, _ in from_host] == [4 * BLOCK] * 3
        assert from_host == on_device
