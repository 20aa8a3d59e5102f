"""The native index with policies that learn: a twin and a model check each choice."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvtier.core import hot
from kvtier.core.types import DISK, HOST
from kvtier.index import State
from tests.index.indexes import LEARNING, Both
from tests.index.learning import LearningRules, learning_tiers
from tests.index.test_index_machine import TIERS, IndexMachine, Path, paths


class LearningMachine(LearningRules, IndexMachine):
    """The index machine with reported requests. The policy's eviction order is not LRU's."""

    policy: ClassVar[str]
    prompts = paths
    learning = (HOST, DISK)

    def make_index(self) -> Any:
        return Both(TIERS, learning=self.learning, policy=self.policy)

    def _check_order(self, path: Path, candidates: set[Path], tier: str) -> None:
        if tier not in self.learning:
            super()._check_order(path, candidates, tier)

    def named(self, prompt: Path) -> tuple[Any, ...]:
        return prompt[0], prompt[1:]

    @rule(
        path=paths,
        tier=learning_tiers,
        num_free=st.integers(0, 3),
        least_chance=st.sampled_from([0.0, 0.1, 0.9]),
    )
    def admit(self, path: Path, tier: str, num_free: int, least_chance: float) -> None:
        known = [path[:length] for length in range(2, len(path) + 1)]
        absent = [
            self.model[name].block
            for name in known
            if name in self.model and self.model[name].tiers[tier].state is State.ABSENT
        ]
        admitted = self.index.admit(absent, tier, num_free, least_chance)
        assert least_chance or list(admitted[:num_free]) == absent[:num_free]


@pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
@pytest.mark.parametrize("policy", LEARNING)
def test_native_index_twin_and_model_agree_where_a_policy_learns(policy: str) -> None:
    few = settings(stateful_step_count=50)  # the LRU machine runs the other half
    machine = type("Machine", (LearningMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=few)
