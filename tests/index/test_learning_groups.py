"""Several KV groups in the flat index with a learned policy.

The blocks of all groups at one place of a prompt are evicted together, so the choices are those of
one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import RankMover
from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.core.types import DISK, HOST, BlockId, Slot
from kvtier.index import KeyIndex, make_key_index
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.tiers import DistantAllocator, SlotAllocator
from tests.index.indexes import LEARNING
from tests.index.policies.live_tier import names
from tests.index.policies.traffic import TRAFFIC
from tests.index.test_key_index import NS, TIERS
from tests.index.test_learning_keys import LearningMachine, left

FULL, WINDOW, STATE = b"\0", b"\1", b"\2"
PLACES = [bytes([number]) * 3 for number in range(8)]


pytestmark = pytest.mark.skipif(not NATIVE, reason=f"no native core: {NATIVE_REASON}")


@pytest.fixture(params=LEARNING)
def any_index(request: pytest.FixtureRequest) -> KeyIndex:
    return NativeKeyIndex(dict.fromkeys(TIERS, request.param), lambda: NS, 1)


def both(places: Sequence[bytes]) -> list[bytes]:
    """Return keys of two groups, in a prompt's order."""
    return [place + group for place in places for group in (FULL, WINDOW)]


def put(index: KeyIndex, keys: Sequence[bytes], tier: str = HOST) -> list[BlockId]:
    blocks = list(index.make(keys))
    slots = [Slot(3 * PLACES.index(key[:3]) + key[3]) for key in keys]
    index.begin_write(blocks, tier, slots)
    index.commit(blocks, tier, 0.0)
    return blocks


class GroupsMachine(LearningMachine):
    """Each place has up to two blocks."""

    group_bytes = 1
    num_beside = 1

    def in_order(self, keys: list[bytes]) -> list[bytes]:
        first = {key[:-1]: at for at, key in reversed(list(enumerate(keys)))}
        return sorted(keys, key=lambda key: first[key[:-1]])


@pytest.mark.parametrize("policy", LEARNING)
def test_native_index_and_its_twin_do_the_same_with_groups(policy: str) -> None:
    machine = type("Machine", (GroupsMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50, deadline=None))


def test_blocks_of_a_place_leave_together_and_from_the_end_of_the_prompt(
    any_index: KeyIndex,
) -> None:
    any_index.on_request(both(PLACES[:3]), 0.0)
    put(any_index, both(PLACES[:3]))
    assert left(any_index, 1) == both(PLACES[2:3])
    assert left(any_index, 9) == [*both(PLACES[1:2]), *both(PLACES[:1])]
    any_index.check_invariants()


def test_a_place_stays_while_one_of_its_blocks_is_held(any_index: KeyIndex) -> None:
    any_index.on_request(both(PLACES[:3]), 0.0)
    blocks = put(any_index, both(PLACES[:3]))
    any_index.lease(blocks[2:3], HOST)
    assert left(any_index, 9) == both(PLACES[2:3])
    any_index.release(blocks[2:3], HOST)
    assert left(any_index, 9) == [*both(PLACES[1:2]), *both(PLACES[:1])]


def test_a_group_may_have_no_block_at_a_place(any_index: KeyIndex) -> None:
    """A recurrent state is stored at the end of a prompt only."""
    full = [place + FULL for place in PLACES[:4]]
    state = PLACES[3] + STATE
    for now in (0.0, 1.0):
        any_index.on_request([*full, state], now)
        put(any_index, [] if now else [*full, state])
    assert left(any_index, 1) == [full[3], state]
    assert left(any_index, 2) == [full[2], full[1]]
    any_index.check_invariants()


def test_what_one_group_has_lost_comes_back_to_its_place(any_index: KeyIndex) -> None:
    any_index.on_request(both(PLACES[:2]), 0.0)
    blocks = put(any_index, both(PLACES[:2]))
    any_index.lose(blocks[1], HOST)
    any_index.check_invariants()
    keys = both(PLACES[:1])
    assert any_index.admit_keys(keys[1:], HOST, 0) == keys[1:], "its place is here"
    put(any_index, keys[1:])
    any_index.check_invariants()
    assert sorted(left(any_index, 9)) == sorted(both(PLACES[:2]))
    any_index.check_invariants()


def test_on_the_disk_a_place_lies_behind_what_it_lies_behind_in_memory(
    any_index: KeyIndex,
) -> None:
    put(any_index, both(PLACES[:3]))
    any_index.on_request(both(PLACES[:3]), 0.0)
    for key in both(PLACES[:3]):
        put(any_index, [key], DISK)
    assert left(any_index, 1, DISK) == both(PLACES[2:3])
    any_index.check_invariants()


class Groups:
    """A host tier with room for ``num_places`` places of a prompt, used as vLLM does.

    windows: for each group besides the full one, how many blocks at a prompt's end it needs.
    """

    def __init__(self, num_places: int, windows: Sequence[int], policy: str) -> None:
        self.now_s = 0.0
        self.groups = [bytes([number]) for number in range(1 + len(windows))]
        self.windows = [None, *windows]
        num_slots = num_places * len(self.groups)
        host = DistantAllocator(num_slots)
        host.open(num_slots)
        rooms: dict[str, SlotAllocator] = {HOST: host}
        index = make_key_index({HOST: policy}, lambda: NS, int(len(windows) > 0))
        self.index = index
        mover = RankMover({}, 1, 1, 1, 0.0, lambda: self.now_s)
        self.cache = LocalBlockCache(
            index, rooms, mover, LadderOptions(1), lambda: NS, lambda: self.now_s
        )

    def request(self, path: Sequence[bytes], now_s: float) -> int:
        """Return the number of leading places that are found in all groups, and store the rest."""
        self.now_s = now_s
        num_groups = len(self.groups)
        keys = [name + group for name in path for group in self.groups]
        if num_groups == 1:
            keys = list(path)
        self.cache.on_request(keys)
        is_there = np.array([at is BlockState.MEMORY for at in self.cache.locate_all(keys)], bool)
        there = is_there.reshape(-1, num_groups)
        hits = next(cut for cut in range(len(path), -1, -1) if self._is_cut(there, cut))
        first = [0 if window is None else max(0, hits - window) for window in self.windows]
        needed = [
            keys[at * num_groups + group]
            for group in range(num_groups)
            for at in range(first[group], hits)
        ]
        self.cache.hold(needed)
        stored = [key for group in range(num_groups) for key in keys[group::num_groups][hits:]]
        room = self.cache.reserve(stored)
        kept = dict.fromkeys(needed)
        assert room is not None
        assert not kept.keys() & set(room.evicted), "a block of its own has left for it"
        self.cache.commit(room.keys, [0] * len(room.keys))
        self.cache.release(needed)
        self.cache.take_changes()
        return hits

    def _is_cut(self, there: np.ndarray, cut: int) -> bool:
        return all(
            there[0 if window is None else max(0, cut - window) : cut, group].all()
            for group, window in enumerate(self.windows)
        )


def serve(traffic: str, windows: Sequence[int], policy: str, num: int = 900) -> list[int]:
    groups = Groups(200, windows, policy)
    found = []
    requests = islice(TRAFFIC[traffic](np.random.default_rng(3)), num)
    for number, (now_s, prompt) in enumerate(requests):
        path = [name.to_bytes(8, "big") for name in names(prompt).tolist()][:200]
        found.append(groups.request(path, now_s))
        if number % 50 == 0:
            groups.cache.check_invariants()
            groups.index.check_invariants()
    return found


TRIED = [("tenants", policy) for policy in LEARNING] + [("scan_flood", RUNS)]


@pytest.mark.parametrize(("traffic", "policy"), TRIED)
def test_with_several_groups_the_choices_are_those_of_one(traffic: str, policy: str) -> None:
    alone = serve(traffic, (), policy)
    assert sum(alone) > 0
    assert serve(traffic, (4, 1), policy) == alone


def test_with_several_groups_prompts_that_come_back_outlast_a_flood() -> None:
    assert sum(serve("scan_flood", (4,), RUNS)) > 3 * sum(serve("scan_flood", (4,), LRU))
