"""The native index with a learned policy.

A twin and a model check each choice. Further tests cover the guarantees that the ladder needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvtier.core import hot
from kvtier.core.hints import END, Said, Word
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Label, Slot
from kvtier.index import PromptIndex, State
from tests.index.indexes import LEARNING as POLICIES
from tests.index.indexes import Both, make
from tests.index.policies.traffic import TRAFFIC
from tests.index.test_index_machine import TIERS, IndexMachine, Path, paths

LEARNING = (HOST, DISK)
NS = b"namespace"


class LearningMachine(IndexMachine):
    """The index machine with reported requests. The policy's eviction order is not LRU's."""

    policy: ClassVar[str]

    def make_index(self) -> Any:
        return Both(TIERS, learning=LEARNING, policy=self.policy)

    def _check_order(self, path: Path, candidates: set[Path], tier: str) -> None:
        if tier not in LEARNING:
            super()._check_order(path, candidates, tier)

    @rule(path=paths, passes=st.sampled_from([0, 1, 60]))
    def asked(self, path: Path, passes: int) -> None:
        self.now += passes
        self.index.on_request(path[0], path[1:], float(self.now))

    @rule(
        path=paths,
        word=st.sampled_from(Word),
        level=st.sampled_from([0, 50, 90]),
        first=st.integers(0, 3),
        length=st.sampled_from([1, 2, END - 3]),
        lasts=st.sampled_from([0, 5, 100]),
    )
    def retain(
        self, path: Path, word: Word, level: int, first: int, length: int, lasts: int
    ) -> None:
        said = Said(word, level, first, first + length, float(self.now + lasts))
        self.index.retain(path[0], path[1:], said, float(self.now))

    @rule(
        path=paths,
        tier=st.sampled_from(LEARNING),
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

    @rule(at_blocks=st.sampled_from([0.0, 2.0, 64.0]))
    def set_recompute_slope(self, at_blocks: float) -> None:
        self.index.set_recompute_slope(at_blocks)

    @rule(tier=st.sampled_from(LEARNING), num_blocks=st.sampled_from([1, 2, 50]))
    def set_room(self, tier: str, num_blocks: int) -> None:
        self.index.set_room(tier, num_blocks)
        self.index.on_request(
            NS, [Label(b"x")], float(self.now)
        )  # blocks beyond the maximum are then forgotten


@pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
@pytest.mark.parametrize("policy", POLICIES)
def test_native_index_twin_and_model_agree_where_a_policy_learns(policy: str) -> None:
    few = settings(stateful_step_count=50)  # the LRU machine runs the other half
    machine = type("Machine", (LearningMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=few)


@pytest.fixture
def index() -> PromptIndex:
    return make("native", (DEVICE, HOST), learning=(HOST,))


class Host:
    """A host tier that gets the requested blocks that it admits. The device then evicts them."""

    def __init__(self, index: PromptIndex, capacity: int) -> None:
        self.index = index
        self.free = [Slot(number) for number in range(capacity)]
        self.num_left_out = 0
        index.set_room(HOST, capacity)

    def request(self, labels: Sequence[Label], now: float) -> int:
        """Request a prompt, and store it. Return the number of leading blocks found."""
        index = self.index
        index.on_request(NS, labels, now)
        states = index.states(NS, labels, HOST)
        found = [*(state is State.READY for state in states), False].index(False)
        slots = [Slot(number) for number in range(len(labels))]
        blocks, *_ = index.insert(NS, labels, DEVICE, slots, now)
        held = list(blocks[:found])
        index.lease(held, HOST)
        new = list(blocks[found:])
        admitted = index.admit(new, HOST, len(self.free)) if len(new) > len(self.free) else new
        self.num_left_out += len(new) - len(admitted)
        self.free += index.drop(HOST, len(admitted) - len(self.free))
        for block in admitted[: len(self.free)]:
            index.begin_write(BlockId(block), HOST, self.free.pop())
            index.commit(BlockId(block), HOST, now)
        index.release(held, HOST)
        index.drop(DEVICE, len(labels))
        return found


def labels_of(keys: np.ndarray) -> list[Label]:
    return [Label(int(key).to_bytes(8, "big")) for key in keys]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_never_leaves_and_the_end_of_a_prompt_first(policy: str) -> None:
    index = make("native", (DEVICE, HOST), learning=(HOST,), policy=policy)
    host = Host(index, 8)
    first, second = ([Label(name + bytes([at])) for at in range(4)] for name in (b"a", b"b"))
    host.request(first, 0.0)
    host.request(second, 1.0)
    held = index.extend(NS, first)
    index.lease(held[2:3], HOST)
    left = index.evict(HOST, 8)
    assert [*left] == [held[3], *reversed(index.extend(NS, second))]
    index.forget_all(left, HOST)
    index.release(held[2:3], HOST)
    assert len(index.drop(HOST, 8)) == 3
    index.check_invariants()


def test_a_flood_of_prompts_is_left_out_once_it_is_known(index: PromptIndex) -> None:
    host = Host(index, 200)
    rng = np.random.default_rng(3)
    hits = asked = 0
    for number, (now, keys) in enumerate(TRAFFIC["scan_flood"](rng)):
        if number == 900:
            break
        found = host.request(labels_of(keys), now)
        if number > 600 and len(keys) == 20:
            hits, asked = hits + found, asked + len(keys)
    assert hits > 0.4 * asked, "with least recently used first hardly any is found"
    assert host.num_left_out > 0
    index.check_invariants()


def test_what_is_waited_for_stays_and_an_ended_session_leaves_first(index: PromptIndex) -> None:
    host = Host(index, 12)
    first, second, third = (
        [Label(b"s"), *(Label(name + bytes([at])) for at in range(3))]
        for name in (b"a", b"b", b"c")
    )
    for now, labels in enumerate((first, second, third)):
        host.request(labels, float(now))
    index.retain(NS, first, Said(Word.WAITS, 0, 0, END, 100.0), 3.0)
    index.retain(NS, third, Said(Word.ENDED, 0, 0, END, 100.0), 3.0)
    left = [*index.evict(HOST, 6)]
    assert left == [*reversed(index.extend(NS, third)[1:]), *reversed(index.extend(NS, second)[1:])]
    index.forget_all(left, HOST)
    index.check_invariants()


def test_of_a_bad_word_nothing_is_taken(index: PromptIndex) -> None:
    for said in (Said(9, 0, 0, 1, 1.0), Said(0, 200, 0, 1, 1.0), Said(0, 0, 2, 1, 1.0)):
        with pytest.raises(ValueError, match="is not in|no places"):
            index.retain(NS, [Label(b"a")], said, 1.0)
    with pytest.raises(ValueError, match="finite number of seconds"):
        index.retain(NS, [Label(b"a")], Said(0, 0, 0, 1, float("nan")), 1.0)
