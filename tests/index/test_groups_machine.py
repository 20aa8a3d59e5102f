"""The index of models with several groups of layers.

Native index, twin and a dictionary side by side, with one to three groups of random rules.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvtier import _hot
from kvtier.index import ReuseRule, State
from kvtier.types import DEVICE, HOST, AnyColumn, Column, GroupMatch, Slot
from tests.index.indexes import Both, make, needed, rules_of_models
from tests.index.test_index_machine import STEPS, IndexMachine, Path, Place, paths

TIERS = (DEVICE, HOST)


class GroupMachine(IndexMachine):
    """All that a single group does, in each column of a model with several; and their cuts."""

    def make_index(self) -> Any:
        return None  # before the rules are known

    @initialize(rules=rules_of_models)
    def begin(self, rules: list[ReuseRule]) -> None:
        self.reuse_rules = rules
        self.index = self.make_index_of(rules)
        self.columns = [Column(tier, group) for group in range(len(rules)) for tier in TIERS]

    def make_index_of(self, rules: list[ReuseRule]) -> Any:
        return Both(TIERS, rules)

    def _num_needed(self, tier: AnyColumn, num_blocks: int) -> int:
        assert isinstance(tier, Column)
        return len(needed(self.reuse_rules[tier.group], num_blocks))

    @rule(path=paths, tier=st.sampled_from(TIERS), data=st.data())
    def compute(self, path: Path, tier: str, data: st.DataObject) -> None:
        """Every group has its part of the path, or of its end."""
        for group in range(len(self.reuse_rules)):
            first = data.draw(st.integers(0, len(path) - 2))
            blocks = self.index.extend(path[0], path[1:])
            column = Column(tier, group)
            for at, block in enumerate(blocks, start=2):
                known = self.model.setdefault(path[:at], self._new(block))
                if at >= first + 2 and known.tiers[column].state is State.ABSENT:
                    known.tiers[column] = Place(State.WRITING, self.next_slot)
                    self.index.begin_write(block, column, Slot(self.next_slot))
                    self.next_slot += 1
                    self._commit(known, column)
        self._prune()

    def _check_match(self, path: Path) -> None:
        assert self.index.match_groups(path[0], path[1:]) == self._expected_groups(path)
        if [rule.num_last for rule in self.reuse_rules] == [None]:
            assert self.index.match(path[0], path[1:]).over_groups().blocks == (
                self._expected_groups(path).blocks
            )

    def _expected_groups(self, path: Path) -> GroupMatch:
        """From the definition of a cut, whatever lies behind it or in between."""
        fastest: list[list[str | None]] = [[] for _ in self.reuse_rules]
        arriving: list[list[bool]] = [[] for _ in self.reuse_rules]
        num_known = next((n for n in range(2, len(path) + 1) if path[:n] not in self.model), None)
        end = len(path) - 1 if num_known is None else num_known - 2
        for length in range(2, end + 2):
            places = self.model[path[:length]].tiers
            for group in range(len(self.reuse_rules)):
                ready = [t for t in TIERS if places[Column(t, group)].state is State.READY]
                is_written = places[Column(DEVICE, group)].state is State.WRITING
                fastest[group].append(ready[0] if ready else None)
                arriving[group].append(bool(ready) and is_written)
        cuts = [
            cut
            for cut in range(1, end + 1)
            if all(
                fastest[group][at] is not None
                for group, rule in enumerate(self.reuse_rules)
                for at in needed(rule, cut)
            )
        ]
        last = max(cuts, default=0)
        return GroupMatch(
            tuple(self.model[path[:length]].block for length in range(2, last + 2)),
            tuple(tuple(each[:last]) for each in fastest),
            tuple(tuple(each[:last]) for each in arriving),
            tuple(cuts),
            len(path) - 1,
        )


class TwinGroupMachine(GroupMachine):
    """The twin alone."""

    def make_index_of(self, rules: list[ReuseRule]) -> Any:
        return make("python", TIERS, rules)


@pytest.mark.skipif(not _hot.NATIVE, reason=f"no native core: {_hot.NATIVE_REASON}")
def test_native_index_twin_and_model_agree_on_groups() -> None:
    run_state_machine_as_test(GroupMachine, settings=STEPS)


@pytest.mark.skipif(_hot.NATIVE, reason="runs beside the native index")
def test_twin_and_model_agree_on_groups() -> None:
    run_state_machine_as_test(TwinGroupMachine, settings=STEPS)
