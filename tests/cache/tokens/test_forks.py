"""A forked child has a copy of all that its parent made, and must not touch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.tokens.forking import NOT_HERE
from tests.tiers.disk.harness import harness

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def command(scenario: str, ending: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.cache.tokens.forking", scenario, ending, str(folder)]


@pytest.mark.parametrize("ending", ["exit", "_exit"])
@pytest.mark.parametrize("scenario", ["ring", "slab", "lock", "arena", "cache"])
def test_parent_keeps_what_it_made_when_a_child_ends(
    tmp_path: Path, scenario: str, ending: str
) -> None:
    done = subprocess.run(
        command(scenario, ending, tmp_path),
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode == NOT_HERE:
        pytest.skip("no io_uring here")
    assert done.returncode == 0, done.stderr[-3000:]


def test_slab_of_a_process_that_was_killed_is_free_though_its_child_lives(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("killed", "_exit", tmp_path),
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with harness(tmp_path) as here:
            assert [result.name for result in here.get(1)] == ["THERE"]
