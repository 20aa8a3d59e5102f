"""Index of cached blocks: a trie, or a flat table of keys. No I/O, no tensors."""

from __future__ import annotations

from kvtier.index.block_index import BlockIndex
from kvtier.index.choice import make_index, make_key_index
from kvtier.index.key_index import KeyIndex
from kvtier.index.prompt_index import Inserted, PromptIndex
from kvtier.index.residency import State

__all__ = [
    "BlockIndex",
    "Inserted",
    "KeyIndex",
    "PromptIndex",
    "State",
    "make_index",
    "make_key_index",
]
