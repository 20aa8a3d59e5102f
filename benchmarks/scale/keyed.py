"""A keyed cache of any size over ranks that complete at once, and the operations of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import Done, Hello, RankMover, Report
from kvtier.core.types import DISK, HOST
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.tiers import DistantAllocator, Quota, StorageFacts

KEY_BYTES = 36
"""Bytes of a vLLM key: a SHA-256 and the number of a group."""
BLOCK_BYTES = 1 << 20
FILL = 10_000
"""Blocks that are stored at a time."""
NUM_TO_MOVE = 64
PROMPT_BLOCKS = 6_250
"""Blocks of a prompt of 100,000 tokens."""
NAMESPACE = b"n" * 32


def new_keys(num: int) -> list[bytes]:
    """Return keys that no cache has."""
    text = os.urandom(num * KEY_BYTES)
    return [text[at : at + KEY_BYTES] for at in range(0, len(text), KEY_BYTES)]


class Harness:
    """A full host tier of ``num_blocks`` blocks, and one rank with a disk of the same capacity."""

    def __init__(self, num_blocks: int) -> None:
        mover = RankMover({DISK: StorageFacts(finds_at_once=True)}, BLOCK_BYTES, 1, 1)
        rooms = {HOST: DistantAllocator(num_blocks), DISK: Quota(lambda: num_blocks)}
        self.mover, self.host = mover, rooms[HOST]
        self.index = make_key_index({HOST: LRU, DISK: LRU}, lambda: NAMESPACE)
        self.cache = LocalBlockCache(
            self.index,
            rooms,
            mover,
            LadderOptions(BLOCK_BYTES, piece_blocks=NUM_TO_MOVE),
            lambda: NAMESPACE,
            time.monotonic,
        )
        self.ladder = self.cache.ladder
        self.hear(Report(hellos={0: Hello(num_blocks)}))
        self.last: list[bytes] = []
        for at in range(0, num_blocks, FILL):
            self.last = new_keys(min(FILL, num_blocks - at))
            self.store(self.last, to_storage=False)

    def hear(self, report: Report) -> None:
        """Process the ranks' report of a step, as vLLM's connector does."""
        self.mover.hear(report)
        self.host.open(self.mover.num_open)  # type: ignore[attr-defined]
        self.cache.distrust(report.failed)
        self.cache.poll()
        self.cache.take_changes()

    def store(self, keys: Sequence[bytes], to_storage: bool = True) -> None:
        """Store new blocks as an engine does; others are evicted for them."""
        room = self.cache.reserve(keys)
        assert room is not None
        self.cache.commit(room.keys, range(len(room.keys)), to_storage)

    def answer(self) -> None:
        """Report the rank's orders as done."""
        for order in self.mover.take_orders():
            num_bytes = len(order.names) * BLOCK_BYTES
            self.hear(Report(done={order.order_id: Done(frozenset(), num_bytes=num_bytes)}))


def steps(harness: Harness) -> dict[str, Callable[[], object]]:
    """Return the operations of a step, by name."""
    prompt = harness.last[:PROMPT_BLOCKS]
    few = prompt[:NUM_TO_MOVE]

    def store() -> None:
        harness.store(new_keys(NUM_TO_MOVE), to_storage=False)

    def write() -> None:
        harness.store(new_keys(NUM_TO_MOVE))
        harness.ladder.poll()
        harness.answer()

    def load() -> None:
        harness.cache.hold(few)
        harness.cache.release(few)

    return {
        "look up a prompt of 6,250 blocks": lambda: harness.cache.locate_all(prompt),
        "use a prompt of 6,250 blocks": lambda: harness.cache.touch(prompt),
        "hear a report, nothing failed": lambda: harness.hear(Report(steps=frozenset([1]))),
        "hold and release 64 blocks": load,
        "store 64 blocks, 64 others leave": store,
        "the same, and write them to storage": write,
    }
