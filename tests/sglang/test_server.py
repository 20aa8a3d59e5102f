"""Real servers: what they find on disk, and that it is what they computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.sglang.servers import PAGE, prompt, server, storage

LONG = 20 * PAGE + 30
"""Tokens of a prompt: its last page is not full."""


@pytest.mark.timeout(900)
def test_pages_come_from_disk_after_a_flush_and_after_a_kill(tmp_path: Path) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with server(log, *storage(folder)) as first:
        cold = [first.ask(each) for each in prompts]
        warm = [first.ask(each) for each in prompts]
        first.settle(folder, len(prompts) * (LONG // PAGE))
        first.flush()
        flushed = [first.ask(each) for each in prompts]
        first.kill()
    with server(log, *storage(folder)) as second:
        restarted = [second.ask(each) for each in prompts]
    assert [each.num_cached for each in cold] == [0] * len(prompts)
    for device, *stored in zip(warm, flushed, restarted, strict=True):
        assert (device.num_cached, device.num_stored) == (LONG // PAGE * PAGE, 0)
        for answer in stored:
            assert answer.num_stored == LONG // PAGE * PAGE
            assert answer.logprobs == device.logprobs
