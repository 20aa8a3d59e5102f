"""Real vLLM engines over one node: what one has computed, the next one loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import model
from tests.engines.vllm.engines import BLOCK, Answers, Connects, engine, one_by_one, prompt
from tests.engines.vllm.test_pipeline import LAYERS, stages
from tests.kit.nodes import NodeProcess, running

PROMPTS = [prompt(seed, 4 * BLOCK + 44) for seed in range(4)]
SETTINGS: dict[str, Any] = {"node_deadline_s": 1.0}
SIZES = {
    **model.SIZES,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of a model of four layers, two for each stage of a pipeline."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    disk = ("--disk-path", str(tmp_path / "disk"), "--disk-capacity=128MiB")
    with running(tmp_path, *disk, segments=256) as made:
        yield made


def test_second_engine_loads_what_the_first_has_computed(
    node: NodeProcess, alone: Answers, connects: Connects
) -> None:
    config = connects(node=str(node.socket), **SETTINGS)
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert llm.reset_prefix_cache()
        node.kill()
        assert [answer for _, answer in one_by_one(llm, PROMPTS)] == [
            answer for _, answer in alone["cold"]
        ]


@pytest.mark.usefixtures("two_cores")
def test_both_ranks_of_an_engine_load_what_those_of_another_have_computed(
    node: NodeProcess, connects: Connects
) -> None:
    config = connects(node=str(node.socket), **SETTINGS)
    with engine(config, tensor_parallel_size=2) as llm:
        cold = one_by_one(llm, PROMPTS)
        assert [cached for cached, _ in cold] == [0] * len(PROMPTS)
        warm = one_by_one(llm, PROMPTS)
    with engine(config, tensor_parallel_size=2) as llm:
        assert one_by_one(llm, PROMPTS) == warm


def test_both_stages_of_a_pipeline_load_what_those_of_another_have_computed(
    node: NodeProcess, connects: Connects, tmp_path: Path
) -> None:
    config = connects(node=str(node.socket), **SETTINGS)
    folder = model.make_model(tmp_path / "model", SIZES)
    with stages(config, (2, 2), model=folder) as llm:
        cold = one_by_one(llm, PROMPTS)
        assert [cached for cached, _ in cold] == [0] * len(PROMPTS)
        warm = one_by_one(llm, PROMPTS)
    with stages(config, (2, 2), model=folder) as llm:
        assert one_by_one(llm, PROMPTS) == warm
    assert [cached for cached, _ in warm] == [4 * BLOCK] * len(PROMPTS)


def test_unequal_stages_of_a_pipeline_compute_what_a_node_cant_hold(
    node: NodeProcess, connects: Connects
) -> None:
    """The part of the second one is larger than what each has of a block."""
    config = connects(node=str(node.socket), **SETTINGS)
    found = []
    for _ in range(2):
        with stages(config, LAYERS) as llm:
            found.append(one_by_one(llm, PROMPTS))
    assert found[0] == found[1]
    assert [cached for cached, _ in found[1]] == [0] * len(PROMPTS)
