"""A thousand requests on two ranks, over tiers that fail or are slow.

All are answered, and from their own KV.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.servers import PAGE, Answer, Server, linker, prompt, server, storage

NUM_PROMPTS = 40
NUM_REQUESTS = 1000
NUM_CLIENTS = 8
CLOSE = 1e-3
"""Difference between log-probabilities that were computed in other batches; those of another prompt
differ by more."""
FAULTS = {
    "storage": {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.5",
    },
    "linker": {"KVTIER_TEST_DISK": "some fail"},
}
"""SGLang's own fault injection is in front of its storage; below the linker the disk fails."""


def _close(answer: Answer, wanted: Answer) -> bool:
    """Whether the first token has the same probability."""
    return abs(answer.logprobs[0][0][0] - wanted.logprobs[0][0][0]) < CLOSE


def _ask_all(running: Server, prompts: list[list[int]], order: list[int]) -> list[Answer]:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        return list(clients.map(lambda at: running.ask(prompts[at], 4), order))


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_thousand_requests_over_faults(tmp_path: Path, kind: str) -> None:
    rng = random.Random(7)
    prompts = [prompt(seed, rng.randrange(3, 12) * PAGE + 10) for seed in range(NUM_PROMPTS)]
    order = [rng.randrange(NUM_PROMPTS) for _ in range(NUM_REQUESTS)]
    if kind == "storage":
        options = storage(tmp_path / "slab", waits="timeout")
    else:  # a seventh of the prompts fits into host memory
        options = linker(tmp_path / "slab", host_capacity="12MiB")
    faults: Any = FAULTS[kind]
    with server(tmp_path / "log", *options, num_ranks=2, **faults) as running:
        cold = [running.ask(each, 4) for each in prompts]
        answers = _ask_all(running, prompts, order)
    assert len(answers) == NUM_REQUESTS
    assert sum(answer.num_cached for answer in answers) > 0
    wrong = [at for at, answer in zip(order, answers, strict=True) if not _close(answer, cold[at])]
    assert wrong == []
