"""Accepted and refused requests, and the choice of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier.core.errors import Closed, ConfigError
from kvtier.core.types import PrefetchPolicy
from kvtier.serve.engine import (
    Engine,
    EngineBusy,
    EngineConfig,
    RequestError,
    SamplingParams,
    Token,
)
from kvtier.serve.engine.models import load_model

from .conftest import changed

pytestmark = pytest.mark.engine

Make = Callable[[EngineConfig], Engine]


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], SamplingParams(), "The prompt is empty"),
        ([10**6], SamplingParams(), "token ids outside"),
        ([-1], SamplingParams(), "token ids outside"),
        ([5], SamplingParams(max_tokens=-1), "max_tokens is -1"),
        ([5], SamplingParams(max_tokens=10**6), "together 1000001"),
        ([5], SamplingParams(temperature=-1.0), "temperature is -1.0"),
        ([5], SamplingParams(top_p=0.0), "top_p is 0.0"),
        ([5], SamplingParams(top_k=-1), "top_k is -1"),
        ([5], SamplingParams(num_logprobs=21), "num_logprobs is 21"),
        ([5], SamplingParams(prompt_logprobs=21), "prompt_logprobs is 21"),
        ([5], SamplingParams(min_p=1.1), "min_p is 1.1"),
        ([5], SamplingParams(presence_penalty=-2.1), "presence_penalty is -2.1"),
        ([5], SamplingParams(frequency_penalty=2.1), "frequency_penalty is 2.1"),
        ([5], SamplingParams(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        ([5], SamplingParams(min_tokens=17), "min_tokens is 17"),
        ([5], SamplingParams(logit_bias=((4096, 1.0),)), "name the token id 4096"),
        ([5], SamplingParams(stop_token_ids=(-1,)), "name the token id -1"),
    ],
)
def test_bad_requests_get_one_clear_sentence(
    tiny: Engine, prompt: list[int], params: SamplingParams, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        tiny.submit(prompt, params)


def test_a_full_queue_refuses(make: Make) -> None:
    engine = make(changed(max_running=1, max_queue=1))
    engine.submit([5] * 300, SamplingParams(max_tokens=200))
    engine.submit([6] * 300, SamplingParams(max_tokens=200))
    with pytest.raises(EngineBusy, match="try again later"):
        engine.submit([7] * 300)


def test_a_closed_engine_refuses(make: Make) -> None:
    engine = make(changed())
    engine.close()
    with pytest.raises(Closed):
        engine.submit([5])


def test_model_with_unknown_layers_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("deepseek_v4").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="heavily_compressed_attention"):
        load_model(str(tmp_path), torch.device("cpu"), "auto")


def test_tokens_stream_in_order_and_agree_with_the_completion(
    make: Make, prompt: list[int]
) -> None:
    seen: list[Token] = []
    params = SamplingParams(max_tokens=9, num_logprobs=3)
    completion = make(changed()).submit(prompt, params, on_token=seen.append).result(60)
    assert tuple(seen) == completion.tokens
    assert completion.token_ids == tuple(token.token_id for token in seen)
    assert 0 < completion.ttft_s <= completion.e2e_s
    for token in seen:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0] == (token.token_id, token.logprob)  # greedy takes the best


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_one_waits_for_another_without_a_host_tier(make: Make, policy: PrefetchPolicy) -> None:
    """There is no tier below the device, as by default."""
    config = changed(host=0, max_running=1)
    config = replace(config, cache=replace(config.cache, prefetch_policy=policy))
    engine = make(config)
    prompts = [[5] * 100, [6] * 100, [5] * 100, [7] * 100]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    done = [each.result(60) for each in [engine.submit(prompt, params) for prompt in prompts]]
    assert [each.finish_reason for each in done] == ["length"] * 4
    assert [each.num_cached_tokens for each in done] == [0, 0, 96, 0]


def test_auto_is_the_cpu_where_torch_knows_an_accelerator_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_a_build_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_a_build_for_cuda)
    with Engine(replace(changed(), device="auto")) as engine:
        assert engine.info.device == "cpu"


@pytest.mark.parametrize(("threads", "cores", "expected"), [(0, 1, 1), (0, 99, 2), (3, 1, 3)])
def test_compute_threads_are_no_more_than_the_cores_of_a_quota(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, expected: int
) -> None:
    def not_loaded(*_: object) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr("kvtier.serve.engine.engine.load_model", not_loaded)
    monkeypatch.setattr("kvtier.serve.engine.engine.num_cores", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="far enough"):
            Engine(EngineConfig(threads=threads))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
