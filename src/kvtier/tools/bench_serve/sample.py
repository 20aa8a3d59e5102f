"""Sample of the model's text, so that a person sees that real text was served."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.serve.engine import Engine, SamplingParams
from kvtier.tools.report.corpus import Prompt

SHOWN_TOKENS = 40
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The end of a prompt, and the model's greedy continuation."""

    ending: str
    continuation: str


def take_sample(engine: Engine, prompt: Prompt) -> Sample:
    """Let a running engine continue ``prompt``."""
    params = SamplingParams(max_tokens=SHOWN_TOKENS)
    completion = engine.submit(prompt, params).result(TIMEOUT_S)
    decode = engine.tokenizer.decode
    return Sample(decode(prompt[-SHOWN_TOKENS:]), decode(completion.token_ids))
