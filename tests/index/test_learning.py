"""Both native indexes with policies that learn: guarantees that the ladder needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.core.hints import END, BlockHint, HintKind
from kvtier.core.types import HOST
from kvtier.index.policies.replayed import RUNS
from tests.index.indexes import LEARNING
from tests.index.learning import HOSTS, Host
from tests.index.policies.traffic import TRAFFIC, Keys, prompt

pytestmark = [
    pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}"),
    pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__),
]

Make = Callable[[str, int], Host]


@pytest.mark.parametrize("policy", LEARNING)
def test_what_is_held_never_leaves_and_the_end_of_a_prompt_first(make: Make, policy: str) -> None:
    host = make(policy, 8)
    for number in (1, 2):
        host.request(prompt(number, 4), float(number))
    first, second = host.blocks(prompt(1, 4)), host.blocks(prompt(2, 4))
    host.index.lease(first[2:3], HOST)
    assert host.evict(8) == [first[3], *reversed(second)]
    host.index.release(first[2:3], HOST)
    assert host.evict(8) == first[2::-1]
    host.index.check_invariants()


def test_a_flood_of_prompts_is_left_out_once_it_is_known(make: Make) -> None:
    host = make(RUNS, 200)
    hits = asked = 0
    requests = islice(TRAFFIC["scan_flood"](np.random.default_rng(3)), 900)
    for number, (now, keys) in enumerate(requests):
        found = host.request(keys, now)
        if number > 600 and len(keys) == 20:
            hits, asked = hits + found, asked + len(keys)
    assert hits > 0.4 * asked, "with least recently used first hardly any is found"
    assert host.num_left_out > 0
    host.index.check_invariants()


def behind_one(number: int) -> Keys:
    """Return a prompt of four blocks, of which all others have the first."""
    return np.concatenate([prompt(9, 1), prompt(number, 3)])


def test_what_is_waited_for_stays_and_an_ended_session_leaves_first(make: Make) -> None:
    host = make(RUNS, 12)
    for number in (1, 2, 3):
        host.request(behind_one(number), float(number))
    waits, ended = (
        BlockHint(HintKind.WAITS, 0, 0, END, 100.0),
        BlockHint(HintKind.ENDED, 0, 0, END, 100.0),
    )
    host.index.retain(*host.path(behind_one(1)), waits, 3.0)
    host.index.retain(*host.path(behind_one(3)), ended, 3.0)
    second, third = host.blocks(behind_one(2)), host.blocks(behind_one(3))
    assert host.evict(6) == [*third[:0:-1], *second[:0:-1]]
    host.index.check_invariants()


def test_what_has_a_priority_stays_for_its_time(make: Make) -> None:
    host = make(RUNS, 8)
    for number in (1, 2):
        host.request(prompt(number, 4), 4.0 * (number - 1))
    host.index.retain(*host.path(prompt(1, 4)), BlockHint(HintKind.KEEP, 90, 0, 2, 60.0), 4.0)
    first, second = host.blocks(prompt(1, 4)), host.blocks(prompt(2, 4))
    assert host.evict(6) == [*first[3:1:-1], *second[::-1]]
    host.request(prompt(2, 2), 60.0)
    assert host.evict(2) == first[1::-1]
    host.index.check_invariants()


def test_of_a_bad_word_nothing_is_taken(make: Make) -> None:
    host = make(RUNS, 8)
    path = host.path(prompt(1, 1))
    for said in (
        BlockHint(9, 0, 0, 1, 1.0),
        BlockHint(0, 200, 0, 1, 1.0),
        BlockHint(0, 0, 2, 1, 1.0),
    ):
        with pytest.raises(ValueError, match="is not in|no places"):
            host.index.retain(*path, said, 1.0)
    with pytest.raises(ValueError, match="finite number of seconds"):
        host.index.retain(*path, BlockHint(0, 0, 0, 1, float("nan")), 1.0)
