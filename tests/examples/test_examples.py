"""The examples run, and say what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.effort import EFFORT

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_facade_example_reuses_from_memory_and_disk(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "facade.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split()[0] for line in lines] == ["0", "96", "96", "96", "48"]


@pytest.mark.skipif(
    EFFORT < 1, reason="a minute of chats; tests/connectors/transformers has short ones"
)
@pytest.mark.engine
def test_attach_example_reuses_in_one_chat_and_in_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "transformers_attach.py")]
    for tiers in ("host", "disk, host"):
        done = subprocess.run(
            [*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=250
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line for line in lines if "the same answers" in line] == [
            "          the same answers: True"
        ] * 2
        reused = [line.split(", ")[1].split() for line in lines if "reused" in line and "," in line]
        shares = [int(each[0]) / int(each[2]) for each in reused[:2]]
        assert 0.6 < shares[0] <= shares[1]
        assert set(lines[-1].partition(": ")[2].split(", ")) == set(tiers.split(", "))
