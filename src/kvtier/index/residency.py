"""Residency of a block in a tier: states and legal transitions.

             begin_write        commit             evict
    ABSENT -------------> WRITING ------> READY <--------> EVICTING
      ^                      |              |      keep        |
      +------- abort --------+------- forget ------------------+

A leased block is READY and being read, or WRITING and waited for. It must not be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from kvtier.core.types import Slot


class State(IntEnum):
    """State of a block in a tier. Integers, because they are hashed and compared often."""

    ABSENT = auto()
    WRITING = auto()
    READY = auto()
    EVICTING = auto()


MOVES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.ABSENT, State.WRITING),
        (State.WRITING, State.READY),
        (State.WRITING, State.ABSENT),
        (State.READY, State.EVICTING),
        (State.EVICTING, State.READY),
        (State.EVICTING, State.ABSENT),
    }
)


@dataclass(slots=True)
class Residency:
    """State of one block in one tier.

    num_children: number of children that are WRITING or READY in this tier, and so need this
        block; always 0 in a group that does not need all blocks.
    was_used: whether the block was touched since its write began.
    """

    state: State = State.ABSENT
    slot: Slot = Slot(-1)  # noqa: RUF009 - a constant, Slot is int
    leases: int = 0
    num_children: int = 0
    was_used: bool = False

    def move(self, state: State) -> None:
        assert (self.state, state) in MOVES, f"no move from {self.state.name} to {state.name}"
        stays = state in (State.WRITING, State.READY)
        assert stays or self.leases == 0, "a leased block may not leave a tier"
        self.state = state

    @property
    def is_there(self) -> bool:
        """Whether the block is ready or being written."""
        return self.state in (State.WRITING, State.READY)

    @property
    def evictable(self) -> bool:
        """Whether the block is ready, not leased, and no child in this tier needs it."""
        return self.state is State.READY and self.leases == 0 and self.num_children == 0
