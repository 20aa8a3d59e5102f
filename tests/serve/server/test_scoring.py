"""Log probabilities of prompts, as requested by lm-evaluation-harness' ``local-completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtier.serve.engine import Engine, SamplingParams
from kvtier.serve.engine.model_names import BUILTIN

from .conftest import MODEL, Running

pytestmark = pytest.mark.engine

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return a function for log probabilities by transformers alone, after the first token."""
    model: Any = AutoModelForCausalLM.from_pretrained(BUILTIN / MODEL, dtype=torch.float32)

    @torch.inference_mode()
    def compute(token_ids: Sequence[int]) -> torch.Tensor:
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
        found: torch.Tensor = logits.log_softmax(-1)
        return found

    return compute


@pytest.fixture(scope="module")
def prompt(engine: Engine, prefix: str) -> list[int]:
    return engine.tokenizer.encode(prefix)[:391]


def score(served: Running, prompt: Any, **changes: Any) -> list[dict[str, Any]]:
    """Return the choices of a request as the harness sends it."""
    asked = {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **changes,
    }
    answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    choices: list[dict[str, Any]] = body["choices"]
    return choices


def check(choice: dict[str, Any], token_ids: Sequence[int], expected: Any, engine: Engine) -> None:
    """Compare the prompt part of a choice with the log probabilities of transformers."""
    logs = expected(token_ids)
    found = choice["logprobs"]
    num = len(token_ids)
    tokenizer = engine.tokenizer
    assert found["tokens"][:num] == [tokenizer.token_text(each) for each in token_ids]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    own = logs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    given = torch.tensor(found["token_logprobs"][1:num])
    torch.testing.assert_close(given, own, rtol=0, atol=TOLERANCE)
    best = logs.max(-1)
    for at, top in enumerate(found["top_logprobs"][1:num]):
        most_likely = max(top.items(), key=lambda pair: pair[1])
        assert most_likely[0] == tokenizer.token_text(int(best.indices[at]))
        assert most_likely[1] == pytest.approx(float(best.values[at]), abs=TOLERANCE)
    for text, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(text)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_scores_equal_those_of_transformers(
    served: Running, engine: Engine, prompt: list[int], expected: Any, max_tokens: int
) -> None:
    [choice] = score(served, prompt, max_tokens=max_tokens)
    check(choice, prompt, expected, engine)
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
    assert choice["text"].startswith(engine.tokenizer.decode(prompt))


def test_scores_are_the_same_with_the_prompt_in_the_cache(
    served: Running, engine: Engine, prompt: list[int]
) -> None:
    [cold] = score(served, prompt, max_tokens=0, cache_salt="scored")
    plain = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": "scored"}
    usage = [
        httpx.post(f"{served.url}/v1/completions", json=plain, timeout=60).json()["usage"]
        for _ in range(2)
    ]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
    assert cached == [0, 384]  # the score stored nothing, the plain request did
    assert score(served, prompt, max_tokens=0, cache_salt="scored") == [cold]


def test_many_prompts_are_scored_in_order(
    served: Running, engine: Engine, prompt: list[int], expected: Any
) -> None:
    prompts = [prompt[:40], prompt[5:300], prompt[:1], prompt[7:9]]
    choices = score(served, prompts, max_tokens=0)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, token_ids in zip(choices, prompts, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(token_ids)
        check(choice, token_ids, expected, engine)


def test_texts_and_other_numbers_of_alternatives(
    served: Running, engine: Engine, prefix: str, expected: Any
) -> None:
    text = prefix[:90]
    [choice] = score(served, text, max_tokens=0, logprobs=5)
    assert choice["text"] == text
    logs = expected(engine.tokenizer.encode(text))
    tops = choice["logprobs"]["top_logprobs"][1:]
    assert all(5 <= len(top) <= 6 for top in tops)
    for top, row in zip(tops, logs.topk(5).values, strict=True):
        assert sorted(top.values(), reverse=True)[:5] == pytest.approx(row.tolist(), abs=TOLERANCE)
    [bare] = score(served, text, max_tokens=0, logprobs=0)
    assert bare["logprobs"]["top_logprobs"] is None
    assert bare["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]


def test_parts_of_characters_have_offsets_of_whole_ones(served: Running, engine: Engine) -> None:
    text = "x = '日本é'"
    [choice] = score(served, text, max_tokens=0)
    found = choice["logprobs"]
    assert choice["text"] == text
    assert "\ufffd" in found["tokens"]
    for at, (token, offset) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        assert text[:offset] == engine.tokenizer.decode(engine.tokenizer.encode(text)[:at]).rstrip(
            "\ufffd"
        )
        assert "\ufffd" in token or text[offset:].startswith(token)


def test_a_stream_brings_the_same_scores(client: openai.OpenAI, served: Running) -> None:
    text = "def parse(value):\n    return int(value)\n"
    [whole] = score(served, text, max_tokens=4)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=text,
            max_tokens=4,
            temperature=0,
            logprobs=1,
            echo=True,
            stream=True,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks]
        assert [each for part in parts for each in part] == whole["logprobs"][name], name


def test_the_harness_reads_a_choice(served: Running, engine: Engine, expected: Any) -> None:
    """Repeat its arithmetic: the sum over the continuation, and whether that is greedy."""
    context, continuation = (
        engine.tokenizer.encode(each) for each in ("import os\nimport", " sys\n")
    )
    [choice] = score(served, [context + continuation])
    found, num = choice["logprobs"], len(context)
    total = sum(found["token_logprobs"][num:-1])
    is_greedy = all(
        token == max(top.items(), key=lambda pair: pair[1])[0]
        for token, top in zip(found["tokens"][num:-1], found["top_logprobs"][num:-1], strict=True)
    )
    logs = expected(context + continuation)[num - 1 :]
    ids = torch.tensor(continuation)
    assert total == pytest.approx(float(logs.gather(1, ids[:, None]).sum()), abs=TOLERANCE)
    assert is_greedy == torch.equal(logs.argmax(-1), ids)


def test_the_engine_scores_beside_other_requests(engine: Engine, prompt: list[int]) -> None:
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    alone = engine.submit(prompt, asked).result(60)
    assert len(alone.prompt_tokens) == len(prompt)
    handles = [
        engine.submit(prompt[at:], replace(asked, prompt_logprobs=at % 2 or None, max_tokens=3))
        for at in range(6)
    ]
    assert engine.submit(prompt, asked).result(60).prompt_tokens == alone.prompt_tokens
    for at, handle in enumerate(handles):
        assert len(handle.result(60).prompt_tokens) == (len(prompt) - at) * (at % 2)
