"""Share of the long tests to run: all, unless ``KVTIER_EFFORT`` is for example 0.1.

With less effort the same *fixed set* of tests runs each time, so that a failure is the change's
fault: one case of each test that is not marked as nightly. `make test` runs all cases of all tests;
so does the nightly workflow.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from random import Random

EFFORT = float(os.environ.get("KVTIER_EFFORT", "1"))
ALL_CASES = "tests/docs/"
"""Tests of which all cases always run: a page each, in no time."""


def effort(num: int, step: int = 1) -> int:
    """Return the share of ``num`` turns to run, in whole steps."""
    return max(step, int(num * EFFORT) // step * step)


def chosen_cases(tests: Mapping[str, bool]) -> set[str]:
    """Choose tests by their ids; with less effort than 1 the fixed set.

    The case of a test is chosen by the test's name alone, so it is the same in every run and in
    every process.

    tests: whether each is marked as nightly.
    """
    if EFFORT == 1:
        return set(tests)
    cases: dict[str, list[str]] = defaultdict(list)
    for test, is_nightly in tests.items():
        file, *_, function = test.partition("[")[0].split("::")
        if not is_nightly:
            cases[f"{file}::{function}"].append(test)
    chosen: set[str] = set()
    for name, some in cases.items():
        chosen.update(some if name.startswith(ALL_CASES) else [Random(name).choice(some)])
    return chosen
