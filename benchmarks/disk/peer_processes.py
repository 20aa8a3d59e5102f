"""Processes of the compared disk caches, one for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import OURS, Contestant
from benchmarks.peers.lines import LineProcess
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


class Worker(LineProcess):
    """The process of a disk cache."""

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
        (folder / "blocks").mkdir(parents=True)
        options = {
            "--module": contestant.module,
            "--options": json.dumps(contestant.options),
            "--folder": folder / "blocks",
            "--block-bytes": block_bytes,
            "--num-blocks": num_blocks,
            "--batch": batch,
        }
        words = [word for pair in options.items() for word in pair]
        words += ["--small-pages"] * small_pages
        arguments = ["-m", "benchmarks.peers.worker", *words]
        super().__init__(contestant.name, contestant.python, arguments, QUIET)


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
