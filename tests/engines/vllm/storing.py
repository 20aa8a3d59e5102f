"""Serves prompts endlessly, and prints a line for each answered batch; to be killed in the middle.

python -m tests.engines.vllm.storing SLAB
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tests.engines.vllm.engines import BLOCK, engine, prompt, run, with_disk

if __name__ == "__main__":
    with engine(with_disk(Path(sys.argv[1]), host_capacity="64MiB", disk_capacity="64MiB")) as llm:
        for seed in itertools.cycle(range(6)):
            run(llm, *(prompt(10 * seed + each, 6 * BLOCK + 50) for each in range(4)))
            sys.stdout.write(f"answered {seed}\n")
            sys.stdout.flush()
