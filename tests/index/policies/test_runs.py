"""Behaviour of the learned policy on prompts, by its hits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.index.policies.replayed import PolicyReplay
from tests.index.policies.traffic import CAPACITY, TRAFFIC, Keys, prompt

pytestmark = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")


def ask(replay: PolicyReplay, requests: Iterable[tuple[float, Keys]]) -> int:
    """Return the number of hits."""
    return sum(replay.request(keys, now) for now, keys in requests)


def test_prompts_that_nobody_repeats_are_not_even_stored_once_that_is_known() -> None:
    replay = PolicyReplay("runs", 100)
    habits = [(float(now), prompt(now % 4, 20)) for now in range(1000)]
    once = [(now + 0.5, prompt(1000 + now, 20)) for now in range(1000)]
    traffic = sorted(habits + once, key=lambda request: request[0])
    ask(replay, traffic[:1000])
    before = replay.num_stored
    assert ask(replay, traffic[1000:]) == 500 * 20
    # They are stored in free space only: the repeated prompts take 80 of 100 blocks.
    assert replay.num_stored - before < 0.25 * 500 * 20


def test_seconds_count_and_not_requests() -> None:
    """Two kinds of prompts are each used twice: within seconds, or after an hour.

    The tier has room for those that are used soon, and for no others.
    """
    replay, lru = PolicyReplay("runs", 45), PolicyReplay("lru", 45)
    requests: list[tuple[float, Keys]] = []
    for step in range(1500):
        now = 20.0 * step
        requests.append((now, prompt(2 * step, 10)))
        requests.append((now + 9.0, prompt(2 * step, 10)))
        late = prompt(2 * step + 1, 40)
        requests += [(now + 1.0, late), (now + 3600.0, late)]
    requests.sort(key=lambda request: request[0])
    half = len(requests) // 2
    ask(replay, requests[:half])
    ask(lru, requests[:half])
    num_soon = sum(len(keys) for _, keys in requests[half:] if len(keys) == 10) / 2
    assert ask(lru, requests[half:]) < 0.6 * num_soon
    assert ask(replay, requests[half:]) > 0.9 * num_soon


def test_the_last_block_of_a_prompt_is_known_to_be_its_last() -> None:
    """Conversations grow, and each turn ends with a new last block.

    The policy learns that the last block is never used again, and gives the space to others. The
    tier has room for half of all blocks.
    """
    replay = PolicyReplay("runs", 100)
    asked = stored = 0
    for turn in range(600):
        for user in range(10):
            body = prompt(user + 100 * (turn // 20), 2 + turn % 20)
            last = prompt(10_000_000 + 100 * turn + user, 1)
            before = replay.num_stored
            replay.request(np.concatenate([body, last]), 10.0 * turn + user)
            if turn >= 300:
                asked += 1
                stored += replay.num_stored - before
    # Two blocks of each request are new: one is used again. LRU stores ten, with others gone.
    assert stored < 1.2 * asked


def test_the_same_seed_chooses_the_same_and_another_seed_much_the_same() -> None:
    def hits(seed: int) -> int:
        replay = PolicyReplay("runs", CAPACITY, seed=seed)
        return ask(replay, list(TRAFFIC["uniform"](np.random.default_rng(3)))[:4000])

    assert hits(1) == hits(1)
    assert hits(2) == pytest.approx(hits(1), rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_by_time_more_time_is_saved_than_by_blocks(seed: int) -> None:
    """Short prompts and long prompts are repeated; other prompts come once.

    A run's last block saves most time, but is worth nothing without those in front of it. So it
    does not determine the run's worth.
    """
    chance = np.random.default_rng(seed)
    asked: list[Keys] = []
    for number in range(6000):
        if chance.random() < 0.5:
            asked.append(prompt(int(chance.integers(0, 60)), 20))
        elif chance.random() < 0.7:
            asked.append(prompt(1000 + int(chance.integers(0, 12)), 200))
        else:
            asked.append(prompt(10_000 + number, int(chance.integers(10, 200))))

    def saved(doubles_at_blocks: float) -> float:
        replay = PolicyReplay("runs", CAPACITY, doubles_at_blocks=doubles_at_blocks)
        found = [replay.request(keys, float(now)) for now, keys in enumerate(asked)]
        return sum(hits + hits**2 / 2 / 20 for hits in found)

    assert saved(20.0) > 1.01 * saved(0.0)


def test_a_prompt_of_a_million_tokens_is_a_few_runs() -> None:
    """Its history takes a few entries, not one per block."""
    replay = PolicyReplay("runs", 70_000)
    replay.request(prompt(1, 65_536), 0.0)
    for number in range(2, 5):
        replay.request(prompt(number, 65_536), 60.0 * number)
    assert replay.num_blocks == 70_000
    assert replay.num_history < 100
    assert replay.request(prompt(4, 65_536), 600.0) == 65_536
    replay.check_invariants()
