"""/v1/completions through the openai client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from kvtier.serve.engine import Engine, EngineConfig

from ..engine.checkpoints import sentencepiece_model
from .conftest import MODEL, running

pytestmark = pytest.mark.engine

PROMPT = "def parse_arguments(self, args):\n"


def complete(client: openai.OpenAI, **given: Any) -> Any:
    """Return the answer to a greedy request of 24 tokens, with other fields as given."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **given}
    return client.completions.create(**asked)


def text_of(client: openai.OpenAI, **given: Any) -> str:
    text: str = complete(client, **given).choices[0].text
    return text


def test_an_answer_has_the_shape_of_the_api(client: openai.OpenAI, engine: Engine) -> None:
    answer = complete(client, max_tokens=5)
    num_prompt = len(engine.tokenizer.encode(PROMPT))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert [choice.finish_reason for choice in answer.choices] == ["length"]
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == num_prompt + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_the_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_many_prompts_and_choices_are_numbered_in_order(
    client: openai.OpenAI, engine: Engine
) -> None:
    prompts = ["import os\n", "class Node:\n"]
    answer = complete(client, prompt=prompts, n=2, max_tokens=3, echo=True)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [text.startswith(prompts[at // 2]) for at, text in enumerate(texts)] == [True] * 4
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    same = complete(client, prompt=ids, n=2, max_tokens=3, echo=True)
    assert [choice.text for choice in same.choices] == texts
    streamed, ends = [""] * 4, []
    for chunk in complete(client, prompt=prompts, n=2, max_tokens=3, echo=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2, 3]


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(client)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 5
    assert last.choices == []
    assert last.usage.completion_tokens == 24


def test_every_chunk_has_the_tokens_so_far_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(client, max_tokens=8, stream=True, stream_options=options)
    so_far = [chunk.usage.completion_tokens for chunk in chunks]
    assert len(so_far) > 1
    assert so_far == sorted(so_far)
    assert 1 <= so_far[0] < so_far[-1] == last.usage.completion_tokens == 8
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        assert chunk.usage.prompt_tokens_details is None  # known only at the end
    assert last.usage.prompt_tokens_details is not None


def test_a_seed_repeats_what_was_drawn(client: openai.OpenAI) -> None:
    def draw(seed: int, n: int) -> list[str]:
        answer = complete(client, max_tokens=16, temperature=1.5, seed=seed, n=n)
        return [choice.text for choice in answer.choices]

    first = draw(1, 3)
    assert len(set(first)) == 3
    assert draw(2, 3) != first
    # The make-up of a batch may change the rounding, so repeat one request at a time.
    assert draw(7, 1) == draw(7, 1)


def test_top_k_of_minus_one_is_off(client: openai.OpenAI) -> None:
    off, all_tokens = (
        text_of(client, temperature=1.5, seed=3, extra_body={"top_k": top_k}) for top_k in (-1, 0)
    )
    assert off == all_tokens


@pytest.mark.parametrize(
    "change", [{"temperature": 1e-30}, {"temperature": 1, "extra_body": {"top_k": 1}}]
)
def test_a_vanishing_temperature_and_a_single_token_are_greedy(
    client: openai.OpenAI, change: dict[str, Any]
) -> None:
    assert text_of(client, **change) == text_of(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_across_tokens_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    pieces = [chunk.choices[0].text for chunk in complete(client, stream=True)]
    whole = "".join(pieces)
    at = next(at for at in range(6, len(pieces)) if pieces[at] and pieces[at + 1])
    stop = pieces[at][-1] + pieces[at + 1][0]
    found = complete(client, stop=[stop, "\0"], stream=stream)
    chunks = list(found) if stream else [found]
    assert stop in whole
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.find(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert stream or found.usage.completion_tokens < 24


def test_a_stop_ends_the_work_too(client: openai.OpenAI) -> None:
    whole = text_of(client)
    # 7000 tokens take longer than the client waits.
    given = {"max_tokens": 7000, "extra_body": {"ignore_eos": True}}
    assert text_of(client, stop=whole[5:8], **given) == whole[: whole.find(whole[5:8])]


def test_logprobs_come_in_four_lists(client: openai.OpenAI) -> None:
    [choice] = complete(client, max_tokens=12, logprobs=3).choices
    found = choice.logprobs
    assert len(found.tokens) == 12
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert len(top) == 3
        assert max(top.values()) == top[token] == logprob <= 0


def test_a_stop_cuts_the_logprobs_too(client: openai.OpenAI) -> None:
    [choice] = complete(client, logprobs=0, stop=text_of(client)[5:8]).choices
    assert choice.finish_reason == "stop"
    assert choice.logprobs.top_logprobs is None
    assert max(choice.logprobs.text_offset, default=-1) < len(choice.text)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvtier"


def test_an_answer_keeps_the_blank_that_sentencepiece_leaves_out(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "model")
    with Engine(EngineConfig(model=str(model), device_capacity="4MiB", threads=1)) as engine:
        [harness] = engine.tokenizer.encode("harness")
        asked: Any = {"max_tokens": 2, "temperature": 0, "logit_bias": {str(harness): 100}}
        with running(engine) as served, served.client() as client:
            for echo in (False, True):
                given = {"model": "model", "prompt": "hello", "echo": echo, "logprobs": 0}
                [choice] = complete(client, **given, **asked).choices
                assert choice.text == "hello" * echo + " harness harness"
                assert choice.logprobs.tokens[-2:] == [" harness", " harness"]
