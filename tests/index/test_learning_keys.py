"""The native flat index with a learned policy.

A twin checks each choice. Further tests cover the places of blocks in their prompts.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.core.types import DISK, HOST, Slot
from kvtier.index import KeyIndex
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import RUNS
from tests.index.indexes import LEARNING
from tests.index.learning import LearningRules, learning_tiers
from tests.index.test_key_index import KEYS, NS, TIERS, KeyIndexMachine, put, some_keys

pytestmark = pytest.mark.skipif(not NATIVE, reason=f"no native core: {NATIVE_REASON}")


@pytest.fixture
def index() -> KeyIndex:
    return NativeKeyIndex(dict.fromkeys(TIERS, RUNS), lambda: NS)


@pytest.fixture(params=LEARNING)
def any_index(request: pytest.FixtureRequest) -> KeyIndex:
    """Return an index under each policy."""
    return NativeKeyIndex(dict.fromkeys(TIERS, request.param), lambda: NS)


class LearningMachine(LearningRules, KeyIndexMachine):
    """The key index machine with reported requests."""

    learning = TIERS
    prompts = some_keys

    def __init__(self) -> None:
        super().__init__()
        self.now = 0

    def in_order(self, keys: list[bytes]) -> list[bytes]:
        """Return keys in the order of one prompt."""
        return keys

    def named(self, prompt: list[bytes]) -> tuple[list[bytes]]:
        return (self.in_order(prompt),)

    @rule(keys=some_keys)
    def continues(self, keys: list[bytes]) -> None:
        first, *others = self.in_order(keys)
        place = len(first) - self.group_bytes
        self.index.continues([key for key in others if key[:place] != first[:place]], first)

    @rule(
        keys=some_keys,
        tier=learning_tiers,
        num_free=st.integers(0, 3),
        least_chance=st.sampled_from([0.0, 0.1, 0.9]),
    )
    def admit(self, keys: list[bytes], tier: str, num_free: int, least_chance: float) -> None:
        admitted = self.index.admit_keys(keys, tier, num_free, least_chance)
        has_places = self.group_bytes > 0  # some blocks of a place may be present
        assert least_chance or has_places or admitted[:num_free] == keys[:num_free]


@pytest.mark.parametrize("policy", LEARNING)
def test_native_index_and_its_twin_do_the_same_where_a_policy_learns(policy: str) -> None:
    machine = type("Machine", (LearningMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50, deadline=None))


def left(index: KeyIndex, num: int, tier: str = HOST) -> list[bytes]:
    """Evict blocks. Return their keys."""
    blocks = index.evict(tier, num)
    keys = index.keys(blocks)
    index.forget(blocks, tier)
    return keys


def test_an_answer_leaves_before_its_question(any_index: KeyIndex) -> None:
    any_index.on_request(KEYS[:2], 0.0)
    put(any_index, KEYS[:2])
    for at in (2, 3, 4):
        any_index.continues(KEYS[at : at + 1], KEYS[at - 1])
        put(any_index, KEYS[at : at + 1])
        put(any_index, KEYS[at : at + 1], DISK)
    put(any_index, KEYS[:2], DISK)
    any_index.on_request(KEYS[:5], 1.0)
    assert left(any_index, 9) == KEYS[4::-1]
    any_index.check_invariants()


def test_blocks_written_together_leave_from_the_end_although_nobody_reported_them(
    index: KeyIndex,
) -> None:
    for keys in KEYS[:4], KEYS[4:8]:
        slots = [Slot(KEYS.index(key)) for key in keys]
        blocks, _ = index.write_new(keys, HOST, slots, 0.0)
        index.commit_prompt(blocks, range(4), HOST, 0.0)
    assert left(index, 3) == KEYS[3:0:-1]
    index.check_invariants()


def test_in_storage_a_block_lies_behind_what_it_lies_behind_in_memory(any_index: KeyIndex) -> None:
    """The policy knows the order from a request before the blocks were stored on disk."""
    for key in KEYS[:3]:
        put(any_index, [key])
    any_index.on_request(KEYS[:3], 0.0)
    for key in KEYS[:3]:
        put(any_index, [key], DISK)
    assert left(any_index, 1, DISK) == [KEYS[2]]
    any_index.check_invariants()


@pytest.mark.parametrize("key_bytes", [8, 32, 36, 100], ids=lambda num: f"{num}-byte keys")
def test_what_was_made_beforehand_holds_keys_of_any_size_and_more_of_them(key_bytes: int) -> None:
    index = NativeKeyIndex(dict.fromkeys(TIERS, RUNS), lambda: NS)
    index.expect(400_000)  # enough for preallocated memory, in all of its parts
    expected = index.num_bytes
    assert expected >= 400_000 * (36 + 12), "nothing was made"
    keys = [number.to_bytes(key_bytes, "little") for number in range(1, 6_001)]
    free = list(range(len(keys)))[::-1]
    for at in range(0, len(keys), 20):
        if at == 2_000:
            index.expect(800_000)  # too late: known blocks are not moved
        if at % 400 == 300:
            free += index.forget(index.evict(HOST, 30), HOST)
        prompt = keys[at : at + 20]
        index.on_request(prompt, float(at))
        blocks = index.make(prompt)
        index.begin_write(blocks, HOST, [Slot(free.pop()) for _ in blocks])
        index.commit(blocks, HOST, float(at))
    index.check_invariants()
    known = index.find_all(keys).known
    assert index.num_held(HOST) == len(known) == len(keys) - 15 * 30
