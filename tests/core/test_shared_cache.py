"""A cache that threads share: it needs no ``poll``, and is durable without ``drain``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache import Cache
from kvtier.config import CacheConfig
from kvtier.devices import Memory, find_device
from kvtier.errors import Closed
from kvtier.keys import token_labels
from kvtier.layout import DType, full_attention, named_layout
from kvtier.shared_cache import SharedCache
from kvtier.tiers import DeviceTier

BLOCK_SIZE = 2
GROUP = full_attention(4, 2, 64, DType.FLOAT32, BLOCK_SIZE)
NS = b"n" * 32


class Engine:
    """Threads that compute prompts: every byte of a block is its first token."""

    def __init__(self, folder: Path, num_blocks: int = 16, lookup_deadline_s: float = 0.1) -> None:
        layout = named_layout("block_first", GROUP, num_blocks)
        self.pool = np.zeros((num_blocks, GROUP.bytes_per_block), np.uint8)
        memory = Memory(self.pool.ctypes.data, layout.nbytes, "host", self.pool)
        config = CacheConfig(
            disk_path=str(folder),
            disk_capacity="1MiB",
            strict=True,
            lookup_deadline_s=lookup_deadline_s,
        )
        self.cache = SharedCache(Cache(config, find_device("cpu"), DeviceTier(memory, layout)))

    def serve(self, prompt: list[int]) -> int:
        """Return the number of reused blocks, whose bytes are checked."""
        labels = token_labels(prompt, BLOCK_SIZE)
        lease = self.cache.fetch(NS, labels, len(prompt), -(-len(prompt) // BLOCK_SIZE))
        assert lease is not None
        num_reused = lease.num_shared
        for at in range(len(labels)):
            block = self.pool[lease.slots[at]]
            if at < num_reused:
                assert (block == prompt[at * BLOCK_SIZE]).all()
            else:
                block[:] = prompt[at * BLOCK_SIZE]
        self.cache.finish(lease, len(labels))
        return num_reused


def prompt(number: int) -> list[int]:
    return [1, 1, 2, 2, 10 + number, 10 + number, 9]


def test_blocks_reach_the_disk_while_nobody_calls(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(prompt(0))
    ends = time.monotonic() + 60
    while num_on_disk(engine) < 3:
        assert time.monotonic() < ends
        time.sleep(0.01)
    engine.cache.close()
    engine = Engine(tmp_path)
    assert engine.serve(prompt(0)) == 3
    engine.cache.close()


def num_on_disk(engine: Engine) -> int:
    """Look without ``poll``: the cache's own thread has to get there."""
    return engine.cache._cache.used_slots()["disk"]


def test_close_writes_what_is_due(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for number in range(4):
        engine.serve(prompt(number))
    engine.cache.close()
    engine = Engine(tmp_path)
    assert [engine.serve(prompt(number)) for number in range(4)] == [3, 3, 3, 3]
    engine.cache.close()


def test_threads_share_blocks_and_room(tmp_path: Path) -> None:
    engine = Engine(tmp_path, num_blocks=24)
    counts: list[int] = []

    def ask(thread: int) -> None:
        counts.extend(engine.serve(prompt((thread + turn) % 6)) for turn in range(30))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.cache.flush()
    engine.cache.call(lambda cache: cache.check_invariants())
    assert len(counts) == 120
    assert sum(counts) >= 2 * 120
    engine.cache.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.serve(prompt(0)),
        lambda engine: engine.cache.flush(),
        lambda engine: engine.cache.observe_prefill(0, 2, 0.1),
    ],
)
def test_a_closed_one_says_so(tmp_path: Path, use: Callable[[Engine], object]) -> None:
    engine = Engine(tmp_path)
    engine.cache.close()
    engine.cache.close()
    assert not engine.cache.is_usable
    with pytest.raises(Closed):
        use(engine)


def test_a_prompt_without_room_gets_no_lease(tmp_path: Path) -> None:
    engine = Engine(tmp_path, num_blocks=4)
    labels = token_labels(prompt(0), BLOCK_SIZE)
    lease = engine.cache.fetch(NS, labels, 7, 4)
    assert lease is not None
    assert engine.cache.fetch(NS, token_labels(prompt(1), BLOCK_SIZE), 7, 4) is None
    engine.cache.finish(lease, 0)
    assert engine.serve(prompt(1)) == 0
    engine.cache.close()
