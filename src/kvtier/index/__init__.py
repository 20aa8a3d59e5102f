"""What is cached, and where: a trie of blocks. No I/O, no tensors."""

from __future__ import annotations

from kvtier.index.block_index import BlockIndex, Inserted
from kvtier.index.choice import make_index
from kvtier.index.groups import ALL, ReuseRule, rules_of
from kvtier.index.residency import State

__all__ = ["ALL", "BlockIndex", "Inserted", "ReuseRule", "State", "make_index", "rules_of"]
