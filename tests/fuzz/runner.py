"""Run the cases of a fuzz target in a process of their own, with limits on each case.

``python -m tests.fuzz.runner TARGET SEED FIRST NUM`` runs the cases ``FIRST`` to ``FIRST + NUM``.
A case follows from the seed, the target and its own number alone, so that it can be repeated. The
last line on stdout counts the outcomes, as JSON. Before it stands the number of each case that
began, so that the parent knows which one killed the process.

A target is a module in ``tests/fuzz/targets`` that has

    attempt(rng: random.Random, folder: Path) -> str
        Make one input from ``rng`` and use it. ``folder`` is empty, and belongs to this process.
        Returns the outcome, a short word. Raises where the input is not survived.
    OUTCOMES: frozenset[str]
        Each of them must occur in a run, so that a target that refuses everything is noticed.

and may have ``CPU_S``, ``WALL_S`` and ``MEMORY_BYTES``, its own limits for one case, and
``INPUTS``, where a case makes several inputs: that many times fewer cases are run.
"""

from __future__ import annotations

import collections
import faulthandler
import importlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

CPU_S = 5.0
"""Processor time of one case, in seconds. A case takes milliseconds."""
WALL_S = 60.0
"""Real time of one case, in seconds: also for one that waits. The machine may be busy."""
MEMORY_BYTES = 512 << 20
"""Address space of one case, beyond what the process has when the cases begin."""


def address_bytes() -> int:
    """Return the address space of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run(target: str, seed: str, first: int, num: int) -> collections.Counter[str]:
    """Run cases in this process. A case beyond its limits ends the process."""
    module = importlib.import_module(target)
    cpu_s, wall_s = getattr(module, "CPU_S", CPU_S), getattr(module, "WALL_S", WALL_S)
    memory = address_bytes() + getattr(module, "MEMORY_BYTES", MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGPROF, chain=True)  # dump the stacks, then die of the signal
    seen: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as parent:
        for number in range(first, first + num):
            os.write(1, b"%d\n" % number)
            folder = Path(parent, str(number))
            folder.mkdir()
            faulthandler.dump_traceback_later(wall_s, exit=True)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            seen[module.attempt(random.Random(f"{seed} {target} {number}"), folder)] += 1
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(folder)
    return seen


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # bad input is what this is about
    print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
