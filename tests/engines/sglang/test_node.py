"""Two real SGLang servers on the CPU over one node: each loads what the other has computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from kvtier.core.types import HOST
from tests.engines.sglang.servers import FRONTS, LONG, NUM_WHOLE, PAGE, prompt, server
from tests.kit.nodes import NodeProcess, running
from tests.kit.waiting import wait_until

PROMPTS = [prompt(seed, LONG) for seed in range(3)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running(tmp_path, segments=256) as made:
        yield made


def _num_stored(node: NodeProcess) -> int:
    rooms = node.control.get("/status")["rooms"]
    used = ((room["used_bytes"] or {}).get(HOST, 0) // room["block_bytes"] for room in rooms)
    return max(used, default=0)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", FRONTS)
def test_server_loads_what_another_has_computed_and_goes_on_without_the_node(
    tmp_path: Path, node: NodeProcess, front: str
) -> None:
    more = {"lookup_deadline_s": 5} if front == "linker" else {}
    options = FRONTS[front](None, node=str(node.socket), **more)
    with server(tmp_path / "first", *options) as first, server(tmp_path / "second", *options) as it:
        for each in PROMPTS:
            assert first.ask(each[:NUM_WHOLE]).num_cached == 0
        warm = [first.ask(each) for each in PROMPTS]
        assert [each.num_cached for each in warm] == [NUM_WHOLE] * len(PROMPTS)
        num_pages = len(PROMPTS) * (LONG // PAGE)
        wait_until(lambda: _num_stored(node) >= num_pages, f"{num_pages} pages are stored")
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
