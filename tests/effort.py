"""Share of the long tests to run: all, unless ``KVTIER_EFFORT`` says for example 0.1."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from random import Random

EFFORT = float(os.environ.get("KVTIER_EFFORT", "1"))
MOST_CASES = 1
"""Cases of one test that run with less effort than all: its parameters, and classes of its file."""
SLOW_SHARE = 1 / 4
"""Share of the tests marked as slow that run with less effort than all."""
ALL_CASES = "tests/docs/"
"""Tests of which all cases always run: a page each, in no time."""
SAMPLE = os.environ.get("KVTIER_SAMPLE", "")
"""Another one chooses other cases."""


def effort(num: int, step: int = 1) -> int:
    """So many of ``num`` turns, in whole steps."""
    return max(step, int(num * EFFORT) // step * step)


def chosen_cases(tests: Mapping[str, bool]) -> set[str]:
    """Choose tests by their ids.

    With less effort some cases of each, and some of the slow tests, at random, the same in each
    process.

    tests: whether each is marked as slow.
    """
    if EFFORT == 1:
        return set(tests)
    cases: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        file, *_, function = test.partition("[")[0].split("::")
        cases[f"{file}::{function}"].append(test)
    chosen: set[str] = set()
    for name, each in cases.items():
        rng = Random(f"{SAMPLE} {name}")
        some = rng.sample(each, _num_chosen(name, len(each)))
        runs_slow = rng.random() < SLOW_SHARE
        chosen.update(test for test in some if runs_slow or not tests[test])
    return chosen


def _num_chosen(name: str, num_cases: int) -> int:
    return num_cases if name.startswith(ALL_CASES) else min(MOST_CASES, num_cases)
