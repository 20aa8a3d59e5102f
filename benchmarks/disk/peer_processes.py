"""Processes of the compared disk caches, one for each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, ROOT, Contestant
from benchmarks.peers.store import BATCH

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}
"""Variables for the peers: no telemetry, and few log lines."""


class Worker:
    """A contestant's process. It is idle between its turns."""

    def __init__(
        self,
        contestant: Contestant,
        folder: Path,
        block_bytes: int,
        num_blocks: int,
        small_pages: bool = False,
        batch: int = BATCH,
    ) -> None:
        self.contestant = contestant
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        (folder / "blocks").mkdir(parents=True)
        arguments = {
            "--module": contestant.module,
            "--options": json.dumps(contestant.options),
            "--folder": folder / "blocks",
            "--block-bytes": block_bytes,
            "--num-blocks": num_blocks,
            "--batch": batch,
        }
        self._process = subprocess.Popen(
            [contestant.python, "-W", "ignore", "-m", "benchmarks.peers.worker"]
            + [str(part) for pair in arguments.items() for part in pair]
            + ["--small-pages"] * small_pages,
            cwd=ROOT,
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            lines = self._complaints.read().strip().splitlines()
            # Threads may print more after the exception.
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            reason = (errors or lines or ["it ended"])[-1]
            raise RuntimeError(f"{self.contestant.name}: {reason}")
        return json.loads(line)

    def ask(self, do: str, **what: object) -> dict[str, Any]:
        """Run a command in the process. Raises AssertionError if bytes are wrong."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        answer = self.answer()
        if answer.get("wrong"):
            raise AssertionError(f"{self.contestant.name}: {answer['wrong']} wrong blocks in {do}")
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._complaints.close()


def start(
    contestants: Sequence[Contestant],
    folder: Path,
    block_bytes: int,
    num_blocks: int,
    small_pages: bool = False,
    batch: int = BATCH,
) -> tuple[list[Worker], dict[str, str]]:
    """Start the contestants that can run, and store their blocks. Return them and the versions.

    Print a line on stderr for each contestant that is left out.
    """
    ready: list[Worker] = []
    versions: dict[str, str] = {}
    for number, contestant in enumerate(contestants):
        if not contestant.python.exists():
            print(
                f"{contestant.name}: left out, `make {contestant.target}` installs it",
                file=sys.stderr,
            )
            continue
        small = small_pages and contestant.peer != OURS
        worker = Worker(contestant, folder / str(number), block_bytes, num_blocks, small, batch)
        try:
            version = str(worker.answer()["version"])
            worker.ask("fill")
        except RuntimeError as error:
            if contestant.peer == OURS:
                raise
            print(f"{error}: left out", file=sys.stderr)
            worker.close()
            continue
        versions[contestant.peer] = version
        ready.append(worker)
    return ready, versions
