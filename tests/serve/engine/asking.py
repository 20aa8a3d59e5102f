"""Run a prompt and compare logits, for tests of KV reuse across restarts."""

from __future__ import annotations

import numpy as np

from kvtier.serve.engine import Completion, Engine, SamplingParams

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, keep_logits=True)


def ask(engine: Engine, prompt: list[int]) -> Completion:
    completion = engine.submit(prompt, GREEDY).result(60)
    assert engine.drain()
    return completion


def same(one: Completion, another: Completion) -> bool:
    assert one.logits is not None
    assert another.logits is not None
    return np.array_equal(one.logits, another.logits)
