"""What is cached, and where: a trie of blocks. No I/O, no tensors."""

from __future__ import annotations

from kvtier.index.block_index import BlockIndex, Inserted
from kvtier.index.choice import make_index
from kvtier.index.residency import State

__all__ = ["BlockIndex", "Inserted", "State", "make_index"]
