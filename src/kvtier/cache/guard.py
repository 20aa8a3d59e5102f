"""Slots of memory that several processes use, and the check of a copy from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Identity of a partition for one tenant; see ``OpenRequest``."""

    scope: bytes
    block_bytes: int
    key_bytes: int
    group_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SlotGuard:
    """Memory of some slots of a node, and the generation of each when it was leased.

    Attributes:
        instance: name of the node's memory.
        partition: the partition.
        generations: one per slot to copy from; a load is wrong if they differ after its copy. A
            slot without a lease gets -1, which never matches. Copies to slots need none.
    """

    instance: str
    partition: PartitionFacts
    generations: Sequence[int]
