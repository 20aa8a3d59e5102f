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


def greedy(client: openai.OpenAI, max_tokens: int = 24) -> str:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=max_tokens, temperature=0
    )
    return answer.choices[0].text


def test_an_answer_has_the_shape_of_the_api(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0)
    num_prompt = len(engine.tokenizer.encode(PROMPT))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert [choice.finish_reason for choice in answer.choices] == ["length"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == num_prompt + 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_the_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_text_and_token_ids_are_the_same_prompt(client: openai.OpenAI, engine: Engine) -> None:
    token_ids = engine.tokenizer.encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=token_ids, max_tokens=24, temperature=0)
    assert answer.choices[0].text == greedy(client)


def test_many_prompts_and_choices_are_numbered_in_order(
    client: openai.OpenAI, engine: Engine
) -> None:
    prompts = ["import os\n", "class Node:\n"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=3, echo=True, temperature=0
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [text.startswith(prompts[at // 2]) for at, text in enumerate(texts)] == [True] * 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(engine.tokenizer.encode(p)) for p in prompts)
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    same = client.completions.create(
        model=MODEL, prompt=ids, n=2, max_tokens=3, echo=True, temperature=0
    )
    assert [choice.text for choice in same.choices] == texts


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(client)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 5
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def test_every_chunk_has_the_tokens_so_far_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True, stream_options=options
    )
    assert last.usage is not None
    so_far = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(so_far) == len(chunks) > 1
    assert so_far == sorted(so_far)
    assert 1 <= so_far[0] < so_far[-1] == last.usage.completion_tokens == 8
    for chunk in chunks:
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        assert chunk.usage.prompt_tokens_details is None  # known only at the end
    assert last.usage.prompt_tokens_details is not None


def test_a_stream_of_many_choices_tells_them_apart(client: openai.OpenAI) -> None:
    texts = ["", ""]
    ends = []
    for chunk in client.completions.create(
        model=MODEL,
        prompt=[PROMPT, "class Tree:\n"],
        max_tokens=6,
        temperature=0,
        stream=True,
        echo=True,
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts[0].startswith(PROMPT)
    assert texts[1].startswith("class Tree:\n")
    assert sorted(ends) == [0, 1]


def test_a_seed_repeats_what_was_drawn(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1.5, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    first = draw(1)
    assert len(set(first)) == 3
    assert draw(2) != first
    # The make-up of a batch may change the rounding, so repeat one request at a time.
    again = [
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1.5, seed=7
        )
        for _ in range(2)
    ]
    assert again[0].choices[0].text == again[1].choices[0].text


def test_a_vanishing_temperature_is_greedy(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1e-30)
    assert answer.choices[0].text == greedy(client)


def test_top_k_of_minus_one_is_off(client: openai.OpenAI) -> None:
    off, all_tokens = (
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=24,
            temperature=1.5,
            seed=3,
            extra_body={"top_k": top_k},
        )
        for top_k in (-1, 0)
    )
    assert off.choices[0].text == all_tokens.choices[0].text


def test_top_k_of_one_is_greedy(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1, extra_body={"top_k": 1}
    )
    assert answer.choices[0].text == greedy(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_across_tokens_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stream=True
        )
    ]
    whole = "".join(pieces)
    at = next(at for at in range(6, len(pieces)) if pieces[at] and pieces[at + 1])
    stop = pieces[at][-1] + pieces[at + 1][0]
    asked: Any = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": [stop, "\0"],
    }  # fmt: skip
    if stream:
        chunks = list(client.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**asked)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens < 24
    assert stop in whole
    assert text == whole[: whole.find(stop)]
    assert reason == "stop"


def test_a_stop_ends_the_work_too(client: openai.OpenAI) -> None:
    whole = greedy(client)
    # 7000 tokens take longer than the client waits.
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=7000,
        temperature=0,
        stop=whole[5:8],
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == whole[: whole.find(whole[5:8])]


def test_logprobs_come_in_four_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3
    )
    choice = answer.choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 12
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert len(top) == 3
        assert max(top.values()) == top[token] == logprob <= 0


def test_logprobs_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 0,
    }
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.top_logprobs is None
    tokens: list[str] = []
    values: list[float] = []
    for chunk in client.completions.create(**asked, stream=True):
        assert chunk.choices[0].logprobs is not None
        tokens += chunk.choices[0].logprobs.tokens or []
        values += chunk.choices[0].logprobs.token_logprobs or []
    assert (tokens, values) == (whole.tokens, whole.token_logprobs)


def test_a_stop_cuts_the_logprobs_too(client: openai.OpenAI) -> None:
    stop = greedy(client)[5:8]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, logprobs=0, stop=stop
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
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
                answer = client.completions.create(
                    model="model", prompt="hello", echo=echo, logprobs=0, **asked
                )
                [choice] = answer.choices
                assert choice.text == "hello" * echo + " harness harness"
                assert choice.logprobs is not None
                assert (choice.logprobs.tokens or [])[-2:] == [" harness", " harness"]
