"""Slabs damaged at random: never a wrong byte, never a crash, never a hang.

``make fuzz`` does a hundred thousand mutations in every verify mode.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_MUTATIONS = int(os.environ.get("KVTIER_NUM_MUTATIONS", "300"))
"""In every verify mode: half of them of one slab, half of a block's two."""
SEED = int(os.environ.get("KVTIER_FUZZ_SEED", str(random.SystemRandom().randrange(2**32))))
BATCH = 5000
"""Mutations that one process does."""
BATCH_S = 1800
"""It has a deadline of its own for every mutation; this is for a process that can't keep it."""
ROOT = Path(__file__).parents[3]


class NotSurvivedError(Exception):
    """A mutation that was not survived, and how to repeat it."""


def fuzz(
    folder: Path, verify: str, num_parts: int, first: int, num: int, control: str = ""
) -> collections.Counter[str]:
    """Run mutations ``first`` to ``first + num`` in a process of their own; return its counts."""
    words = [str(SEED), verify, str(num_parts), str(first), str(num), control]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.tiers.disk.fuzz", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KVTIER_FUZZ_FOLDER": str(folder)},
        timeout=BATCH_S,
        check=False,
    )
    last = (ended.stdout.splitlines() or [""])[-1]
    if ended.returncode:
        again = f"python -m tests.tiers.disk.fuzz {SEED} {verify} {num_parts} {last} 1"
        raise NotSurvivedError(
            f"exit {ended.returncode}, repeat with: {again}\n{ended.stderr[-4000:]}"
        )
    return collections.Counter(json.loads(last))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory if possible, since every mutation makes a new slab.

    The folder is removed at the end, also after the process has died.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as made:
        yield Path(made)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("verify", ["always", "sampled", "off"])
def test_damaged_slab_is_refused_or_gives_right_bytes(
    folder: Path, verify: str, num_parts: int
) -> None:
    print("seed", SEED)
    seen: collections.Counter[str] = collections.Counter()
    num = NUM_MUTATIONS // 2
    for first in range(0, num, BATCH):
        seen += fuzz(folder, verify, num_parts, first, min(BATCH, num - first))
    print(json.dumps(seen))
    assert seen["used"] + seen["refused"] == num
    # What is refused at once shows nothing about what is behind.
    assert seen["used"] > seen["refused"]
    assert seen["right"] > num


@pytest.mark.parametrize(
    ("control", "sign"),
    [("blind", "wrong bytes"), ("crash", "exit -11"), ("hang", "Timeout")],
)
def test_fuzzer_notices_what_it_looks_for(folder: Path, control: str, sign: str) -> None:
    """Controls: checksums that are not compared, a process that crashes, and one that hangs."""
    with pytest.raises(NotSurvivedError, match=r"repeat with: .* 1\n") as caught:
        fuzz(folder, "always", 1, 0, 100, control)
    assert sign in str(caught.value)
