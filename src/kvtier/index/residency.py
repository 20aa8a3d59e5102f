"""Residency of a block in a column, as a table of legal moves.

             begin_write        commit             evict
    ABSENT -------------> WRITING ------> READY <--------> EVICTING
      ^                      |              |      keep        |
      +------- abort --------+------- forget ------------------+

A leased block is READY and being read (or WRITING and waited for): it may not leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from kvtier.types import Slot


class State(IntEnum):
    """Integers, for they are hashed and compared a few times per block and request."""

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
    """One block in one column.

    num_children: its children WRITING or READY in this column, which need it; 0 in a group whose
    blocks are of use without those in front of them. was_used: touched since its write began.
    """

    state: State = State.ABSENT
    slot: Slot = Slot(-1)  # noqa: RUF009 - a constant, Slot is int
    leases: int = 0
    num_children: int = 0
    was_used: bool = False

    def move(self, state: State) -> None:
        assert (self.state, state) in MOVES, f"no move from {self.state.name} to {state.name}"
        stays = state in (State.WRITING, State.READY)
        assert stays or self.leases == 0, "a leased block may not leave a column"
        self.state = state

    @property
    def is_there(self) -> bool:
        """Ready, or on its way, and not about to leave."""
        return self.state in (State.WRITING, State.READY)

    @property
    def evictable(self) -> bool:
        """Ready, nobody reads it, and no child in this column would lose its prefix."""
        return self.state is State.READY and self.leases == 0 and self.num_children == 0
