"""Run the blocks of a page unchanged: in order, in one shell, in a folder of their own.

The folder has the top level of a clone; its ``.venv/bin/kvtier`` is the tested one. Ports are
replaced by free ones, since other programs may use those of the page. Background processes are
ended at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import ROOT, Block
from tests.kit.servers import free_ports

COLUMNS = "110"
"""Width of the terminal that pages show."""
TIMEOUT_S = 900
PORT = re.compile(r"(?:(?<=port[= ])|(?<=127\.0\.0\.1:))\d{4,5}\b")
LINKED = ("benchmarks", "examples", "src", "tests")


class RunError(AssertionError):
    """A block that did not behave as its page describes."""


def run_blocks(blocks: Sequence[Block], folder: Path) -> list[str]:
    """Run blocks; return the output of each, both streams together.

    Raises ``RunError`` if a command fails, or ends otherwise than marked.
    """
    _prepare(folder)
    at = folder.parent / f"{folder.name}.at"
    logs = [folder.parent / f"{folder.name}-{number}.log" for number in range(len(blocks))]
    script = [f"cd {shlex.quote(str(folder))}", "set -o pipefail"]
    for number, (block, log) in enumerate(zip(blocks, logs, strict=True)):
        exits = block.marks.exits
        script += [
            f"echo {number} >{shlex.quote(str(at))}",
            f"set {'+' if exits else '-'}e",
            f"{{\n{block.script}}} >{shlex.quote(str(log))} 2>&1",
            f"[ $? = {exits} ] || exit 1",
        ]
    code = _run(_with_free_ports("\n".join(script)), folder)
    printed = [log.read_text(encoding="utf-8") if log.exists() else "" for log in logs]
    if code:
        number = int(at.read_text(encoding="utf-8"))
        where, said = blocks[number].where, printed[number]
        raise RunError(f"{where} does not end with {blocks[number].marks.exits}:\n{said}")
    return printed


def _prepare(folder: Path) -> None:
    (folder / ".venv/bin").mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    python = shlex.quote(sys.executable)
    for name, what in (("python", python), ("kvtier", f"{python} -m kvtier.tools.cli")):
        script = folder / ".venv/bin" / name
        script.write_text(f'#!/bin/sh\nexec {what} "$@"\n')
        script.chmod(0o755)


def _with_free_ports(script: str) -> str:
    wanted = sorted(set(PORT.findall(script)))
    free = dict(zip(wanted, map(str, free_ports(len(wanted))), strict=True))
    return PORT.sub(lambda found: free[found[0]], script)


def _run(script: str, folder: Path) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env |= {
        "PATH": f"{folder}/.venv/bin:{Path(sys.executable).parent}:{env['PATH']}",
        "COLUMNS": COLUMNS,
        "TMPDIR": str(folder.parent),
        "HOME": str(folder.parent),
        "PYTHONPATH": str(ROOT / "src"),
    }
    shell = subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    try:
        return shell.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing was left in the background
            os.killpg(shell.pid, signal.SIGKILL)
