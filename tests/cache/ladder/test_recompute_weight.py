"""The recompute weight of late blocks follows measured prefill times."""

from __future__ import annotations

from typing import cast

import pytest

from kvtier.cache.ladder.cost_metrics import RecomputeWeight
from kvtier.index import BlockIndex
from kvtier.plan import CostModel

BLOCK_TOKENS = 16


class Told:
    """An index that records each recompute slope that it gets."""

    def __init__(self) -> None:
        self.at_blocks: list[float] = []

    def set_recompute_slope(self, at_blocks: float) -> None:
        self.at_blocks.append(at_blocks)


def measure(costs: CostModel, token_s: float, pair_s: float, times: int = 1) -> None:
    """Observe prefills of whole prompts, short and long."""
    for _ in range(times):
        for length in (100, 1000, 10_000):
            costs.observe_prefill(0, length, token_s * length + pair_s * length * length / 2)
    costs.snapshot()


def worth(costs: CostModel) -> tuple[RecomputeWeight, Told]:
    told = Told()
    return RecomputeWeight(cast("BlockIndex", told), costs, BLOCK_TOKENS), told


def test_blocks_are_worth_the_same_until_something_is_measured() -> None:
    depths, told = worth(CostModel())
    depths.update()
    assert told.at_blocks == []


def test_what_attention_costs_tells_where_a_block_is_worth_twice() -> None:
    costs = CostModel()
    measure(costs, token_s=1e-3, pair_s=1e-6)
    depths, told = worth(costs)
    depths.update()
    assert told.at_blocks == [pytest.approx(1000 / BLOCK_TOKENS, rel=0.01)]


def test_where_attention_costs_nothing_policies_are_not_told() -> None:
    costs = CostModel()
    measure(costs, token_s=1e-3, pair_s=0.0)
    depths, told = worth(costs)
    depths.update()
    assert told.at_blocks == []


def test_small_changes_are_not_told_and_large_ones_are() -> None:
    costs = CostModel()
    measure(costs, token_s=1e-3, pair_s=1e-6)
    depths, told = worth(costs)
    depths.update()
    measure(costs, token_s=1e-3, pair_s=1.1e-6, times=200)
    depths.update()
    assert len(told.at_blocks) == 1
    measure(costs, token_s=1e-3, pair_s=2e-6, times=200)
    depths.update()
    assert told.at_blocks[1:] == [pytest.approx(500 / BLOCK_TOKENS, rel=0.05)]
