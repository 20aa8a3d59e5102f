"""Input from outside, damaged at random: an answer or one sentence, within bounded time and memory.

KVTIER_NUM_MUTATIONS is the number of cases of each target (300; fewer with less effort),
KVTIER_FUZZ_SEED selects them. ``make fuzz`` runs a hundred thousand.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import pkgutil
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.kit.effort import effort

ENOUGH = 300
"""Cases in which each outcome is seen."""
NUM_MUTATIONS = int(os.environ.get("KVTIER_NUM_MUTATIONS", str(effort(ENOUGH, step=60))))
SEED = os.environ.get("KVTIER_FUZZ_SEED", str(random.SystemRandom().randrange(2**32)))
BATCH = 5000
"""Cases that one process runs."""
TARGETS = [module.name for module in pkgutil.iter_modules(targets.__path__)]
ROOT = Path(__file__).parents[2]


class NotSurvivedError(Exception):
    """A case that was not survived, and how to repeat it."""


def fuzz(target: str, first: int, num: int, control: str = "") -> collections.Counter[str]:
    """Run cases ``first`` to ``first + num`` in a process of their own; count the outcomes."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.runner", target, SEED, str(first), str(num)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KVTIER_FUZZ_CONTROL": control},
        check=False,
    )
    last = (ended.stdout.splitlines() or [""])[-1]
    if ended.returncode:
        again = f"python -m tests.fuzz.runner {target} {SEED} {last} 1"
        raise NotSurvivedError(
            f"exit {ended.returncode}, repeat with: {again}\n{ended.stderr[-4000:]}"
        )
    return collections.Counter(json.loads(last))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_gives_an_answer_or_a_sentence(name: str) -> None:
    print("seed", SEED)
    target = f"{targets.__name__}.{name}"
    module = importlib.import_module(target)
    num = max(1, NUM_MUTATIONS // getattr(module, "INPUTS", 1))
    seen: collections.Counter[str] = collections.Counter()
    for first in range(0, num, BATCH):
        seen += fuzz(target, first, min(BATCH, num - first))
    print(json.dumps(seen))
    assert set(seen) <= module.OUTCOMES
    assert NUM_MUTATIONS < ENOUGH or set(seen) == module.OUTCOMES
    assert sum(seen.values()) == num


@pytest.mark.parametrize(
    ("control", "sign"),
    [
        ("busy", "exit -27"),
        ("stuck", "Timeout"),
        ("large", "MemoryError"),
        ("crash", "exit -11"),
        ("wrong", "a wrong answer"),
    ],
)
def test_runner_notices_what_it_looks_for(control: str, sign: str) -> None:
    with pytest.raises(NotSurvivedError, match=r"repeat with: .* 7 1\n") as caught:
        fuzz("tests.fuzz.controls", 7, 3, control)
    assert sign in str(caught.value)
    assert "attempt" in str(caught.value) or control == "crash"


def test_cases_that_are_survived_are_counted() -> None:
    assert fuzz("tests.fuzz.controls", 0, 3) == {"fine": 3}
