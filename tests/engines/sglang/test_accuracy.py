"""Twenty prompts of 3,500 tokens.

Answers with KV from each tier equal those with KV from the device, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.servers import FRONTS, PAGE, prompt, server

NUM_PROMPTS = 20
NUM_TOKENS = 3500
NUM_WHOLE = NUM_TOKENS // PAGE * PAGE


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", FRONTS)
def test_log_probabilities_are_those_of_a_device_hit(tmp_path: Path, front: str) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    options = FRONTS[front](folder, "512MiB")
    prompts = [prompt(seed, NUM_TOKENS) for seed in range(NUM_PROMPTS)]
    with server(log, *options) as first:
        device = []
        for each in prompts:
            assert first.ask(each).num_cached == 0
            device.append(first.ask(each))
        first.settle(folder, NUM_PROMPTS * (NUM_TOKENS // PAGE))
        first.flush()
        flushed = [first.ask(each) for each in prompts]
        first.kill()
    with server(log, *options) as second:
        restarted = [second.ask(each) for each in prompts]
    for answers in (device, flushed, restarted):
        assert [answer.num_cached for answer in answers] == [NUM_WHOLE] * NUM_PROMPTS
        assert [answer.logprobs for answer in answers] == [each.logprobs for each in device]
