"""Test client of storage tiers, and scattered memory for its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import shake_128
from threading import Barrier

import numpy as np

from kvtier.core.types import BlockKey, BlockName
from kvtier.testing.memory import host_memory, memory_bytes
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageTier

UNTOUCHED = 0xAB
NAMESPACE = b"n" * 32
TIMEOUT_S = 60.0


def stored_key(number: int) -> BlockKey:
    """Return the key of test block ``number``."""
    return BlockKey(shake_128(b"key %d" % number).digest(32))


def stored_bytes(key: BlockKey, num_bytes: int) -> bytes:
    """Return the bytes of the block with ``key``, different for each block."""
    return shake_128(b"bytes of " + key).digest(num_bytes)


def cuts(block_bytes: int) -> dict[str, list[int]]:
    """Return layouts of a block by name: sizes of its pieces, whole, equal and unequal."""
    half, quarter = block_bytes // 2, block_bytes // 4
    return {
        "one piece": [block_bytes],
        "equal pieces": [quarter] * 3 + [block_bytes - 3 * quarter],
        "unequal pieces": [1, half - 4, 3, quarter - 2, block_bytes - half - quarter + 2],
    }


class Scattered:
    """Memory for ``num_blocks`` blocks in pieces of ``sizes`` bytes.

    The pieces are unaligned, and not next to the following piece of their block. Bytes outside of
    the pieces have the value ``UNTOUCHED``; initially all bytes do.
    """

    def __init__(self, num_blocks: int, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, np.int64)
        gaps = 1 + 2 * np.arange(num_blocks * len(sizes)) % 13
        order = np.random.default_rng(num_blocks + len(sizes)).permutation(len(gaps))
        lengths = np.tile(self._sizes, num_blocks)[order] + gaps
        begins = np.empty(len(gaps), np.int64)
        begins[order] = 1 + np.cumsum(lengths) - lengths
        self._memory = host_memory(1 + int(lengths.sum()))
        self._bytes = memory_bytes(self._memory)
        self._begins = begins.reshape(num_blocks, len(sizes))
        addresses = (self._begins + self._memory.address).astype(np.uint64)
        self.pieces = Pieces(addresses, self._sizes)
        self.clear()

    def clear(self) -> None:
        """Set the memory back to its first state."""
        self._bytes[:] = UNTOUCHED

    def write(self, at: int, content: bytes) -> None:
        """Write the bytes of block ``at`` to its pieces."""
        self._bytes[self._places(at)] = np.frombuffer(content, np.uint8)

    def read(self, at: int) -> bytes:
        """Return the bytes of block ``at``."""
        return self._bytes[self._places(at)].tobytes()

    def is_untouched(self, at: int) -> bool:
        """Return whether nothing was written to block ``at``."""
        return bool((self._bytes[self._places(at)] == UNTOUCHED).all())

    def check_around(self) -> None:
        """Raise AssertionError if bytes outside of the pieces were changed."""
        around = np.ones(len(self._bytes), bool)
        for at in range(len(self._begins)):
            around[self._places(at)] = False
        assert (self._bytes[around] == UNTOUCHED).all(), "bytes around the pieces were changed"

    def _places(self, at: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the position of each byte of a block: int64 [block_bytes]."""
        runs = zip(self._begins[at].tolist(), self._sizes.tolist(), strict=True)
        return np.concatenate([np.arange(begin, begin + size) for begin, size in runs])


class User:
    """Test client that puts blocks into a storage tier, gets them back, and checks every byte."""

    def __init__(
        self,
        storage: StorageTier,
        sizes: Sequence[int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.storage = storage
        self.timeout_s = timeout_s
        self.sizes = sizes or cuts(storage.bytes_per_block)["unequal pieces"]

    def put(self, *numbers: int, namespace: bytes = NAMESPACE, depth: int = 0) -> list[Outcome]:
        """Put blocks, and check that their memory is unchanged afterwards."""
        keys = [stored_key(number) for number in numbers]
        memory = Scattered(len(keys), self.sizes)
        for at, key in enumerate(keys):
            memory.write(at, self._bytes(key))
        names = [BlockName(namespace, depth + at, key) for at, key in enumerate(keys)]
        outcomes = self.storage.put(names, memory.pieces, self.timeout_s)
        assert len(outcomes) == len(keys)
        assert set(outcomes) <= {Outcome.THERE, Outcome.FAILED}, (
            "a put says that a block is there, or that it failed"
        )
        for at, key in enumerate(keys):
            assert memory.read(at) == self._bytes(key), "a put changed what it was given"
        memory.check_around()
        return outcomes

    def get(self, *numbers: int) -> list[Outcome]:
        """Get blocks, and check that those that are ``THERE`` have the right bytes.

        Also check that absent blocks, and bytes outside of the pieces, are unchanged.
        """
        keys = [stored_key(number) for number in numbers]
        memory = Scattered(len(keys), self.sizes)
        outcomes = self.storage.get(keys, memory.pieces, self.timeout_s)
        assert len(outcomes) == len(keys)
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if outcome is Outcome.THERE:
                assert memory.read(at) == self._bytes(key), f"wrong bytes in block {at}"
            elif outcome is Outcome.ABSENT:
                assert memory.is_untouched(at), f"block {at} is absent, and bytes came for it"
        memory.check_around()
        return outcomes

    def num_known(self, *numbers: int) -> int | None:
        return self.storage.num_known([stored_key(number) for number in numbers])

    def find(self, *numbers: int) -> list[Outcome]:
        outcomes = self.storage.find([stored_key(number) for number in numbers], self.timeout_s)
        assert len(outcomes) == len(numbers)
        return outcomes

    def found(self, *numbers: int) -> list[int]:
        """Return the blocks that exist, looked up one by one."""
        return [number for number in numbers if self.find(number) == [Outcome.THERE]]

    def drop(self, *numbers: int, for_good: bool = False) -> None:
        self.storage.drop([stored_key(number) for number in numbers], for_good)

    def _bytes(self, key: BlockKey) -> bytes:
        return stored_bytes(key, self.storage.bytes_per_block)


def together(jobs: Sequence[tuple[Callable[[int], None], int]], rounds: int) -> None:
    """Run each job in its own thread, ``rounds`` times; the jobs of a round start together."""
    barrier = Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[int], None], at: int) -> None:
        try:
            for _ in range(rounds):
                barrier.wait(TIMEOUT_S)
                job(at)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
