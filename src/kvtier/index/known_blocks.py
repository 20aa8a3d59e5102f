"""Table of the blocks that engines name by keys; it finds them by key and by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.core.types import BlockId
from kvtier.index.residency import Residency, State
from kvtier.index.trie import BlockNumbers

MAX_KEY_BYTES = 256


@dataclass(slots=True)
class KnownBlock:
    """One block: its residency in each tier, its number of uses, and its depth in a prompt."""

    block: BlockId
    key: bytes
    residencies: tuple[Residency, ...]
    num_uses: int = 0
    depth: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether some tier holds the block, or is being filled with it."""
        return any(residency.state is not State.ABSENT for residency in self.residencies)


class KnownBlocks:
    """Table of blocks, by key and by number.

    A block is known from ``make`` until ``drop``. All keys have as many bytes as the first.
    """

    def __init__(self, num_tiers: int) -> None:
        self._num_tiers = num_tiers
        self._numbers = BlockNumbers()
        self._key_bytes: int | None = None
        self._by_key: dict[bytes, KnownBlock] = {}
        self._by_number: dict[BlockId, KnownBlock] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[KnownBlock]:
        """Iterate over the blocks in the order of their places (low 32 bits of the number)."""
        return iter(sorted(self._by_number.values(), key=lambda each: each.block & 0xFFFFFFFF))

    def __getitem__(self, block: BlockId) -> KnownBlock:
        return self._by_number[block]

    def get(self, block: BlockId) -> KnownBlock | None:
        """Return a block by number; None if it is no longer known."""
        return self._by_number.get(block)

    def find(self, key: bytes) -> KnownBlock | None:
        """Return a block by key; None if it is unknown."""
        return self._by_key.get(key)

    def make(self, key: bytes) -> KnownBlock:
        """Return the block of ``key``; make it if it is unknown.

        Raises ValueError for a key of a wrong length.
        """
        self._check(key)
        known = self._by_key.get(key)
        if known is None:
            residencies = tuple(Residency() for _ in range(self._num_tiers))
            known = KnownBlock(self._numbers.take(), key, residencies)
            self._by_key[key] = self._by_number[known.block] = known
        return known

    def _check(self, key: bytes) -> None:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        if self._key_bytes is None:
            self._key_bytes = len(key)
        if len(key) != self._key_bytes:
            raise ValueError(f"a key has {len(key)} bytes, those before it {self._key_bytes}")

    def drop(self, known: KnownBlock) -> None:
        """Remove a block that no tier holds."""
        del self._by_key[known.key], self._by_number[known.block]
        self._numbers.give_back(known.block)

    def check_invariants(self) -> None:
        """Raise AssertionError for a block under a wrong key, or one that no tier holds."""
        for key, known in self._by_key.items():
            assert known.key == key, "a block under another key"
            assert known.is_cached, "a block that nothing needs"
