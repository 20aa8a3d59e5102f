"""Chats by transformers' own pipeline, with the built-in model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, pipeline
from transformers.generation.logits_process import LogitsProcessorList

import kvtier
from kvtier.serve.engine.model_names import BUILTIN

pytestmark = pytest.mark.engine

FOLDER = BUILTIN / "kvtier-tiny"
CHUNK = 64


class Recorder(LogitsProcessor):
    """Records the logits of every step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores.clone())
        return scores


def chat(model: Any, tokenizer: Any, text: str, **options: Any) -> tuple[Any, torch.Tensor]:
    """Hold a chat of three turns; return its messages, and the logits of each step."""
    talk, recorder = pipeline("text-generation", model=model, tokenizer=tokenizer), Recorder()
    messages = [{"role": "system", "content": text}]
    for question in ("What is it?", "How is it used?", "And where does it end?"):
        messages.append({"role": "user", "content": question})
        [found] = talk(
            [messages],
            max_new_tokens=40,
            do_sample=False,
            logits_processor=LogitsProcessorList([recorder]),
            **options,
        )
        messages = found[0]["generated_text"]
    return messages, torch.cat(recorder.steps)


@pytest.mark.slow
def test_a_chat_of_three_turns_equals_the_grid() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = "def walk(tree, depth=0):\n    for child in tree:\n        yield depth, child\n" * 10
    expected = chat(model, tokenizer, text, prefill_chunk_size=CHUNK)
    with kvtier.attach(model, host_capacity="64MiB", chunk_tokens=CHUNK) as cache:
        first = chat(model, tokenizer, text), cache.stats()
        second = chat(model, tokenizer, text), cache.stats()
    for (messages, logits), stats in (first, second):
        assert messages == expected[0]
        assert torch.equal(logits, expected[1])
        assert not stats.passed
    (_, before), (_, after) = first, second
    assert before.num_reused_tokens > 2 * len(tokenizer(text).input_ids) // CHUNK * CHUNK
    assert before.num_kept_tokens >= CHUNK
    num_asked = after.num_prompt_tokens - before.num_prompt_tokens
    assert num_asked == before.num_prompt_tokens
    assert after.num_reused_tokens - before.num_reused_tokens >= num_asked - 3 * CHUNK
