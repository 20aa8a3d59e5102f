"""Prompts begin with BOS if the model's tokenizer adds it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvtier.core.config import CacheConfig
from kvtier.serve.engine import Engine, EngineConfig

from ..engine.checkpoints import checkpoint
from .conftest import running

BOS = 1


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Run the built-in model with a tokenizer that puts BOS before every text."""
    model = checkpoint(tmp_path_factory.mktemp("bos") / "model")
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    token = next(each["content"] for each in tokenizer["added_tokens"] if each["id"] == BOS)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [BOS], "tokens": [token]}},
    }
    path.write_text(json.dumps(tokenizer))
    cache = CacheConfig(host_capacity=0, strict=True)
    config = EngineConfig(model=str(model), device_capacity="32MiB", threads=1, cache=cache)
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(with_bos: Engine) -> Iterator[openai.OpenAI]:
    with running(with_bos) as served, served.client() as made:
        yield made


def test_the_text_of_a_completion_has_bos(client: openai.OpenAI, with_bos: Engine) -> None:
    text = "def add(first, second):\n    return"
    plain = with_bos.tokenizer.encode(text)
    assert plain[0] != BOS

    def ask(prompt: str | list[int]) -> tuple[str, int]:
        answer = client.completions.create(
            model="model", prompt=prompt, max_tokens=8, temperature=0
        )
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.prompt_tokens

    assert ask(text) == ask([BOS, *plain])
    assert ask(text)[1] == len(plain) + 1
    assert ask(plain)[1] == len(plain), "token ids are taken as they are"


def test_a_conversation_has_only_what_its_template_writes(
    client: openai.OpenAI, with_bos: Engine
) -> None:
    message: Any = {"role": "user", "content": "What is a list?"}
    answer = client.chat.completions.create(model="model", messages=[message], max_tokens=1)
    rendered = with_bos.tokenizer.encode(with_bos.tokenizer.render_chat([message]))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rendered)
