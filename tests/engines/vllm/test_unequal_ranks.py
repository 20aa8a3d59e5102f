"""Two ranks of a vLLM pipeline with unequal layers: the same block has another size on each.

Scheduler's half and ranks' halves are kvtier's own, with real slabs; no model runs.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.replica import Replica, replica

SMALL, LARGE = 4096, 16384
"""Bytes of a block on each rank."""
NUM_FIT = 12
"""Blocks that the second rank's half of the disk has room for; the first one's has four times as
many."""
PROMPTS = [range(first, first + 3) for first in range(0, 36, 3)]
"""Three times as many blocks as fit."""


def _pipeline(folder: Path) -> dict[str, object]:
    capacity = 2 * NUM_FIT * LARGE
    return {
        "page_bytes": (SMALL, LARGE),
        "host_capacity": 2 * 4 * LARGE,
        "disk_path": str(folder),
        "disk_capacity": capacity,
        "eviction_policy": "lru",
    }


def _num_disk_blocks(made: Replica) -> tuple[int, int]:
    """Return the blocks on the disk, and the room that may be used."""
    return made.manager.cache.usage()["disk"]


def test_oldest_prompts_leave_the_disk_of_the_rank_with_the_largest_blocks(tmp_path: Path) -> None:
    with replica("", **_pipeline(tmp_path)) as made:
        for numbers in PROMPTS:
            made.compute(*numbers)
            made.settle()
        assert _num_disk_blocks(made) == (NUM_FIT, NUM_FIT)
        assert made.load(*PROMPTS[-1]) == 3
        assert made.load(*PROMPTS[0]) == 0, "the oldest prompt gave way"
    with replica("", **_pipeline(tmp_path)) as made:
        made.settle()
        found = [made.load(*numbers) for numbers in PROMPTS]
    assert found == [0] * 8 + [3] * 4, "a restart finds the newest prompts, byte for byte"
