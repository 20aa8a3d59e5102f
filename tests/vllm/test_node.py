"""Real vLLM engines over one node: what one has computed, the next one loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from tests.nodes import NodeProcess, running
from tests.vllm.engines import BLOCK, connector, engine, one_by_one, own_connector, prompt

PROMPTS = [prompt(seed, 4 * BLOCK + 44) for seed in range(4)]
SETTINGS: dict[str, Any] = {"node_deadline_s": 1.0}
FRONTS = {"offloading": connector, "own": own_connector}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    disk = ("--disk-path", str(tmp_path / "disk"), "--disk-capacity=128MiB")
    with running(tmp_path, *disk, segments=256) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    """Return vLLM's answers without kvtier: computed, and from its own pool."""
    with engine(None) as llm:
        pairs = [one_by_one(llm, [each, each]) for each in PROMPTS]
    return {"cold": [first for first, _ in pairs], "warm": [second for _, second in pairs]}


@pytest.mark.parametrize("front", FRONTS)
def test_second_engine_loads_what_the_first_has_computed(
    node: NodeProcess, alone: dict[str, list[Any]], front: str
) -> None:
    config = FRONTS[front](node=str(node.socket), **SETTINGS)
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert llm.reset_prefix_cache()
        node.kill()
        assert [answer for _, answer in one_by_one(llm, PROMPTS)] == [
            answer for _, answer in alone["cold"]
        ]


@pytest.mark.parametrize("front", FRONTS)
def test_both_ranks_of_an_engine_load_what_those_of_another_have_computed(
    node: NodeProcess, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    config = FRONTS[front](node=str(node.socket), **SETTINGS)
    with engine(config, tensor_parallel_size=2) as llm:
        cold = one_by_one(llm, PROMPTS)
        assert [cached for cached, _ in cold] == [0] * len(PROMPTS)
        warm = one_by_one(llm, PROMPTS)
    with engine(config, tensor_parallel_size=2) as llm:
        assert one_by_one(llm, PROMPTS) == warm
