"""Slots of a node that a process is to copy, and how it checks the copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """Identity of a room for one tenant; see ``OpenRequest``."""

    scope: bytes
    block_bytes: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class SlotGuard:
    """Memory of some slots, and the generation of each when it was leased.

    instance: name of the node's memory. room: the room. generations: one per slot; a load is wrong
    if they differ after its copy. That of a slot that is not leased is one that no slot has.
    """

    instance: str
    room: RoomFacts
    generations: Sequence[int]
