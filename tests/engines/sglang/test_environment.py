"""Real SGLang servers whose environment asks for kvtier, without any option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.servers import LONG, NUM_WHOLE, PAGE, prompt, server


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("front", ["storage back end", "linker"])
def test_a_server_finds_after_a_restart_what_it_has_stored(tmp_path: Path, front: str) -> None:
    folder, log, tokens = tmp_path / "slab", tmp_path / "log", prompt(1, LONG)
    variables: dict[str, Any] = {
        "KVTIER_DISK_PATH": str(folder),
        "KVTIER_DISK_CAPACITY": "256MiB",
        "KVTIER_LOAD_POLICY": "always",
    }
    options = ["--hicache-storage-prefetch-policy", "wait_complete"]
    if front == "linker":
        variables["KVTIER_HOST_CAPACITY"] = "64MiB"
        options = []
    with server(log, *options, **variables) as first:
        cold = first.ask(tokens)
        first.settle(folder, LONG // PAGE)
        first.kill()
    with server(log, *options, **variables) as second:
        again = second.ask(tokens)
        text = second.text
    assert (cold.num_cached, again.num_cached) == (0, NUM_WHOLE)
    assert again.tokens == cold.tokens
    assert text.count(f"kvtier: added its {front}, as the environment asks: ") == 2
