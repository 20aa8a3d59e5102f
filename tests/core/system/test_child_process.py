"""Ends of a child process that may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvtier.core.system import child_process
from kvtier.core.system.child_process import KILLED_S, Overdue, run_module


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def run(folder: Path, code: str, *arguments: str, timeout_s: float = 60.0) -> child_process.Ended:
    (folder / "asked.py").write_text(f"import os, sys, time\n{code}\n")
    return run_module("asked", *arguments, timeout_s=timeout_s, variables={"KVTIER_ASKED": "so"})


def test_it_gets_arguments_and_variables_beside_those_of_this_process(modules: Path) -> None:
    ended = run(modules, "print(sys.argv[1:], os.environ['KVTIER_ASKED'], os.getsid(0))", "a b")
    said, variable, session = ended.output.rsplit(maxsplit=2)
    assert (ended.code, said, variable) == (0, "['a b']", "so")
    assert int(session) != os.getsid(0), "nobody's Ctrl-C ends it"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit('first\\nlast')", "its process ended with 1: last"),
        ("os._exit(3)", "its process ended with 3: without a word"),
        ("os.kill(os.getpid(), 11)", f"its process ended by signal {signal.SIGSEGV.value}"),
        ("import nothing_of_this_name", "with 1: ModuleNotFoundError: No module named"),
    ],
)
def test_it_is_told_how_it_ended(modules: Path, code: str, told: str) -> None:
    assert told in str(run(modules, code))


def test_one_that_stays_is_killed(modules: Path) -> None:
    note = modules / "pid"
    code = f"open({str(note)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    began = time.monotonic()
    with pytest.raises(Overdue, match="^killed$"):
        run(modules, code, timeout_s=3.0)
    assert time.monotonic() - began < 3.0 + KILLED_S + 10.0, "far less than for ever"
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_one_that_cant_be_killed_is_left_behind(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here hangs in the kernel; a kill that does nothing looks the same."""
    left: list[subprocess.Popen[str]] = []

    def leave(child: subprocess.Popen[str]) -> None:
        left.append(child)

    monkeypatch.setattr(subprocess.Popen, "kill", leave)
    monkeypatch.setattr(child_process, "KILLED_S", 0.1)
    try:
        with pytest.raises(Overdue, match="left behind: process [0-9]+ can't be killed"):
            run(modules, "time.sleep(600)", timeout_s=0.1)
    finally:
        monkeypatch.undo()
        for child in left:
            child.kill()
            child.communicate()
