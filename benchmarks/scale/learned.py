"""N1, N4 with a learning policy: new prompts replace others in the flat index."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from benchmarks.report.targets import judged
from benchmarks.scale.keyed import NAMESPACE, new_keys
from benchmarks.scale.part import Part, Row
from kvtier.core.types import DISK, HOST
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.tools.report.stats import Estimate, exactly, median_with_interval

SIZES = (1_000_000, 10_000_000)
QUICK_SIZES = (100_000, 200_000)
PROMPT_BLOCKS = 20
BATCH_PROMPTS = 1_000
ASKED_AGAIN = 5
"""Every n-th prompt of the previous batch is requested again, so that the policy can learn:
recently used blocks are worth more than blocks without a use for a long time."""
SECONDS_APART = 0.01
CALLS = 30
CAPACITIES = 5
"""Capacities that are evicted until the policy's history is full."""
MAX_BLOCK_US = 2.0
MAX_BYTES = 100
OPERATION = "replace a block, prompts of 20"


def _resident_bytes() -> int:
    """Return the resident bytes of the process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return 4096 * int(pages)


class LearnedTier:
    """Index of ``num_blocks`` host blocks above an empty disk, full of prompts of 20 blocks.

    ``process_bytes_per_block`` is the growth of the process.
    """

    def __init__(self, num_blocks: int, policy: str) -> None:
        before = _resident_bytes()
        self.num_blocks = num_blocks
        self._index = make_key_index({HOST: policy, DISK: LRU}, lambda: NAMESPACE)
        self._index.expect(num_blocks)
        self._index.set_room(HOST, num_blocks)
        self._num_free = num_blocks
        self._now = 0.0
        self._prompts: list[list[bytes]] = []
        while self._num_free:
            self.batch()
        self.process_bytes_per_block = (_resident_bytes() - before) / num_blocks

    @property
    def bytes_per_block(self) -> float:
        """Bytes per block, as the index counts them."""
        return float(self._index.num_bytes / self.num_blocks)  # type: ignore[attr-defined]

    def batch(self) -> float:
        """Store new prompts, evicting others where there is no room.

        Return CPU seconds of this thread per block.
        """
        for keys in self._prompts[::ASKED_AGAIN]:
            self._index.on_request(keys, self._now)
        keys = new_keys(BATCH_PROMPTS * PROMPT_BLOCKS)
        self._prompts = [keys[at : at + PROMPT_BLOCKS] for at in range(0, len(keys), PROMPT_BLOCKS)]
        began = time.thread_time()
        num_stored = sum(map(self._store, self._prompts))
        seconds = time.thread_time() - began
        assert num_stored == len(keys), (
            "some are not worth their room: nothing would leave for them"
        )
        return seconds / num_stored

    def _store(self, keys: list[bytes]) -> int:
        """Call the index as the cache and its ladder do. Return how many blocks entered."""
        index = self._index
        self._now += SECONDS_APART
        index.find_all(keys)
        index.on_request(keys, self._now)
        new = index.admit_keys(keys, HOST, self._num_free)
        if self._num_free:
            self._num_free -= len(new)
            slots = range(self._num_free, self._num_free + len(new))
        else:
            slots = index.forget(index.evict(HOST, len(new)), HOST)  # type: ignore[assignment]
        blocks = index.make(new)
        index.begin_write(blocks, HOST, slots)  # type: ignore[arg-type]
        index.touch(blocks, self._now)
        index.set_depths(blocks, range(len(blocks)))  # type: ignore[arg-type]
        index.commit(blocks, HOST, self._now)
        return len(blocks)


def measure(quick: bool) -> Part:
    few, many = QUICK_SIZES if quick else SIZES
    rows = [_in_process(*each) for each in ((many, LRU), (many, RUNS), (few, RUNS, True))]
    ours = rows[1]
    what = {"operation": OPERATION, "policy": RUNS, "blocks": ours.num}
    return Part(
        rows,
        [
            judged("N1", _microseconds(ours), MAX_BLOCK_US, at_least=False, unit="us", **what),
            judged(
                "N4",
                exactly(float(str(ours.more["bytes_per_block"]))),
                MAX_BYTES,
                at_least=False,
                **what,
            ),
        ],
    )


def _microseconds(row: Row) -> Estimate:
    """Return the median in microseconds; targets are compared with four decimal digits."""
    return median_with_interval([1e6 * seconds for seconds in row.seconds])


def _in_process(num_blocks: int, policy: str, remembers_all: bool = False) -> Row:
    """Measure a row in a new process, which has no memory left over from other rows."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(_row, (num_blocks, policy, remembers_all))


def _row(num_blocks: int, policy: str, remembers_all: bool) -> Row:
    """Measure one row.

    Args:
        num_blocks: capacity of the tier.
        policy: its name.
        remembers_all: whether the policy's history is full; otherwise the tier has just become
            full.
    """
    tier = LearnedTier(num_blocks, policy)
    more: dict[str, object] = {
        "bytes_per_block": round(tier.bytes_per_block, 1),
        "process_bytes_per_block": round(tier.process_bytes_per_block, 1),
    }
    if remembers_all:
        for _ in range(CAPACITIES * num_blocks // (BATCH_PROMPTS * PROMPT_BLOCKS)):
            tier.batch()
        more["bytes_per_block_with_history"] = round(tier.bytes_per_block, 1)
    seconds = [tier.batch() for _ in range(CALLS)]
    state = ", all history" if remembers_all else ""
    return Row(OPERATION + state, policy, "blocks", num_blocks, seconds, more)
