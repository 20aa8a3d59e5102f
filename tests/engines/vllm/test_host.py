"""A real vLLM on the CPU with kvtier behind its OffloadingConnector: the host tier.

Needs an environment with vLLM, kvtier and pytest: ``make test-vllm``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.engines.vllm.engines import BLOCK, connector, engine, one_by_one, prompt, run


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with engine(connector(host_capacity="256MiB")) as made:
        yield made


def test_kv_from_host_memory_gives_the_logprobs_of_a_device_hit(llm: Any) -> None:
    # 50 tokens beyond the last full block: both hits are computed from the same boundary.
    prompts = [prompt(seed, 9 * BLOCK + 50) for seed in range(3)]
    (_, first), *_ = run(llm, *prompts)
    on_device = one_by_one(llm, prompts)
    assert [cached for cached, _ in on_device] == [9 * BLOCK] * 3
    assert llm.reset_prefix_cache()
    from_host = one_by_one(llm, prompts)
    assert [cached for cached, _ in from_host] == [9 * BLOCK] * 3
    assert from_host == on_device
    assert first[0] == from_host[0][1][0], "the same tokens as when it was computed"


def test_copies_keep_off_the_cores_that_vllm_computes_on(llm: Any) -> None:
    allowed = os.sched_getaffinity(0)
    bound = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    if not bound.isdigit() or allowed == {int(bound)}:
        pytest.skip("no core is spare, or vLLM computes on several")
    compute = {int(bound)}
    processes = psutil.Process().children(recursive=True)
    (worker,) = (process for process in processes if set(process.cpu_affinity()) == compute)
    cores = [os.sched_getaffinity(thread.id) for thread in worker.threads()]
    assert cores.count(allowed - compute) >= 2, "one thread stores, one loads"


def test_many_prompts_at_once_that_share_a_prefix(llm: Any) -> None:
    shared = prompt(77, 5 * BLOCK)["prompt_token_ids"]
    prompts = [
        {"prompt_token_ids": shared + prompt(100 + each, 2 * BLOCK + 30)["prompt_token_ids"]}
        for each in range(6)
    ]
    run(llm, *prompts)
    alone = one_by_one(llm, prompts)
    assert llm.reset_prefix_cache()
    again = one_by_one(llm, prompts)
    assert [cached for cached, _ in again] == [7 * BLOCK] * 6
    assert again == alone


def test_prompts_beyond_the_device_pool_come_back_from_the_host(llm: Any) -> None:
    prompts = [prompt(1000 + seed, 6 * BLOCK + 20) for seed in range(14)]  # 98 blocks in 64
    cold = one_by_one(llm, prompts)
    assert [cached for cached, _ in cold] == [0] * 14
    warm = one_by_one(llm, prompts)
    assert [cached for cached, _ in warm] == [6 * BLOCK] * 14
    for (_, before), (_, after) in zip(cold, warm, strict=True):
        assert before[0] == after[0]
