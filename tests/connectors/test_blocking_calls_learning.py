"""A slab that several threads call, with eviction that learns from the reported requests."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from kvtier.index.policies.replayed import LRU, RUNS
from tests.connectors.storage_harness import memory
from tests.connectors.test_blocking_calls import Caller, key_of
from tests.index.policies.live_tier import names
from tests.index.policies.traffic import TRAFFIC


def _serve(caller: Caller, path: list[int], tells: bool) -> int:
    """Serve a request as SGLang's controller does; return the number of blocks found."""
    if tells:
        caller.calls.on_request([key_of(number) for number in path])
    found = caller.num_found(*path)
    if found:
        assert caller.load(*path[:found]) == [True] * found
    caller.store(*path[found:], before=path[:found])
    return found


@pytest.mark.slow
def test_prompts_that_come_back_outlast_a_flood_of_others() -> None:
    found = {}
    for policy in (LRU, RUNS):
        caller, hits = Caller(memory(200), policy=policy), 0
        traffic = TRAFFIC["scan_flood"](np.random.default_rng(3))
        for number, (now, prompt) in enumerate(islice(traffic, 900)):
            caller.now_s = now
            hit = _serve(caller, names(prompt).tolist(), policy == RUNS)
            hits += hit if number > 600 else 0
        caller.calls.cache.check_invariants()
        caller.calls.close()
        found[policy] = hits
    assert found[RUNS] > 0.4 * 20 * 100
    assert found[LRU] < 0.1 * found[RUNS]


def test_an_answer_leaves_before_its_question() -> None:
    caller = Caller(memory(8), policy=RUNS)
    assert _serve(caller, [1, 2, 3], tells=True) == 0
    assert caller.store(4, 5, before=[1, 2, 3]) == [True, True]  # no request was for it
    caller.now_s = 1.0
    _serve(caller, [11, 12, 13, 14, 15], tells=True)
    assert caller.num_found(1, 2, 3, 4, 5) >= 3
    caller.calls.cache.check_invariants()
    caller.calls.close()


def test_blocks_of_a_prompt_that_nobody_told_of_are_kept_and_leave() -> None:
    caller = Caller(memory(8), policy=RUNS)
    for at in range(0, 24, 3):
        _serve(caller, [at, at + 1, at + 2], tells=False)
    assert caller.num_found(21, 22, 23) == 3
    caller.calls.cache.check_invariants()
    caller.calls.close()
