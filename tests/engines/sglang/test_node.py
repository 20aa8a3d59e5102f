"""Two real SGLang servers on the CPU over one node: each loads what the other has computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from kvtier.core.types import HOST
from tests.engines.sglang.servers import PAGE, linker, prompt, server, storage
from tests.kit.nodes import NodeProcess, running

LONG = 20 * PAGE + 30
"""Tokens of a prompt: its last page is not full."""
NUM_WHOLE = LONG // PAGE * PAGE
PROMPTS = [prompt(seed, LONG) for seed in range(3)]
PATIENCE_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running(tmp_path, segments=256) as made:
        yield made


def _until_stored(node: NodeProcess, num_pages: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    num_stored = 0
    while time.monotonic() < end_s:
        for room in node.control.get("/status")["rooms"]:
            num_stored = (room["used_bytes"] or {}).get(HOST, 0) // room["block_bytes"]
            if num_stored >= num_pages:
                return
        time.sleep(0.1)
    pytest.fail(f"{num_stored} of {num_pages} pages were stored")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["storage", "linker"])
def test_server_loads_what_another_has_computed_and_goes_on_without_the_node(
    tmp_path: Path, node: NodeProcess, kind: str
) -> None:
    socket = str(node.socket)
    if kind == "storage":
        options = storage(None, node=socket)
    else:
        options = linker(None, node=socket, lookup_deadline_s=5)
    with server(tmp_path / "first", *options) as first, server(tmp_path / "second", *options) as it:
        for each in PROMPTS:
            assert first.ask(each[:NUM_WHOLE]).num_cached == 0
        warm = [first.ask(each) for each in PROMPTS]
        assert [each.num_cached for each in warm] == [NUM_WHOLE] * len(PROMPTS)
        _until_stored(node, len(PROMPTS) * (LONG // PAGE))
        found = [it.ask(each) for each in PROMPTS]
        assert [each.num_cached for each in found] == [NUM_WHOLE] * len(PROMPTS)
        assert [each.logprobs for each in found] == [each.logprobs for each in warm]
        node.kill()
        gone = it.ask(prompt(100, LONG))
        assert (gone.num_cached, len(gone.tokens)) == (0, 8)
        it.flush()
        again = it.ask(PROMPTS[0])
        assert again.tokens == warm[0].tokens
        node.start()
