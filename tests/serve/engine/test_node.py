"""Embedded engines over one node: each loads the KV that another one computed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Engine, EngineConfig
from tests.kit.nodes import NodeProcess, running

from .asking import ask, same
from .conftest import SMALL

pytestmark = pytest.mark.engine

NODE = "node"
"""Name of the tier."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running(tmp_path, segments=64) as made:
        yield made


def over(node: NodeProcess, model: str = "random-gqa") -> EngineConfig:
    cache = replace(
        SMALL.cache, node=str(node.socket), load_policy=LoadPolicy.ALWAYS, lookup_deadline_s=5.0
    )
    return replace(SMALL, model=model, cache=cache)


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_second_engine_loads_what_the_first_has_computed(
    node: NodeProcess, prompt: list[int], model: str
) -> None:
    with Engine(over(node, model)) as one, Engine(over(node, model)) as other:
        cold = ask(one, prompt)
        warm = ask(other, prompt)
    assert cold.num_cached_tokens == 0
    assert warm.hit_tokens == {NODE: 288}
    assert same(cold, warm)


def test_engines_of_two_models_share_one_node(node: NodeProcess, prompt: list[int]) -> None:
    models = ("random-gqa", "random-mla")
    cold = {}
    for model in models:
        with Engine(over(node, model)) as engine:
            cold[model] = ask(engine, prompt)
    for model in models:
        with Engine(over(node, model)) as engine:
            warm = ask(engine, prompt)
        assert warm.hit_tokens == {NODE: 288}
        assert same(cold[model], warm)


def test_engine_serves_without_its_node(node: NodeProcess, prompt: list[int]) -> None:
    with Engine(over(node)) as engine:
        cold = ask(engine, prompt)
    node.kill()
    with Engine(over(node)) as engine:
        again = ask(engine, prompt)
        assert again.num_cached_tokens == 0
        assert same(cold, again)
        node.start()
