"""What the scheduler's process tells the ranks to do with their disks, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtier.types import BlockKey, Slot


class Move(Enum):
    """What becomes of chunks."""

    DEMOTE = "demote"
    """From host slots to the disk."""
    PROMOTE = "promote"
    """From the disk to host slots."""
    FORGET = "forget"
    """Not on the disk any more, not even after a restart."""


@dataclass(frozen=True, slots=True)
class Order:
    """Every rank does the same with its shard of the same chunks.

    keys: the chunks. slots: theirs in host memory, one per key; none for ``FORGET``. depths: place
    of each chunk in its prompt. evicted: chunks that leave the disk first, to make room. namespace:
    digest of what the chunks belong to.
    """

    order_id: int
    move: Move
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...] = ()
    depths: tuple[int, ...] = ()
    evicted: tuple[BlockKey, ...] = ()
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Done:
    """An order that was carried out. failed: positions of chunks that were not moved.

    num_bytes, seconds: what was moved, and how long it took without the time in line.
    """

    failed: frozenset[int] = frozenset()
    num_ranks: int = 1
    num_bytes: int = 0
    seconds: float = 0.0

    def and_also(self, other: Done) -> Done:
        """What two groups of ranks did: only what both have done is done."""
        return Done(
            self.failed | other.failed,
            self.num_ranks + other.num_ranks,
            max(self.num_bytes, other.num_bytes),
            max(self.seconds, other.seconds),
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank has to say about itself; the last one counts.

    num_open: host slots that can be used by now. found: what a restart found on its disk, the
    chunks to leave first in front; only in a rank's first hello, and only where it has a disk.
    probe_bytes, probe_s: read from the disk to see how fast it is, once.
    """

    num_open: int
    found: tuple[BlockKey, ...] | None = None
    probe_bytes: int = 0
    probe_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """From ranks, since their last report.

    done: by order id. hellos: by rank. failed: host slots from or to which a copy went wrong.
    steps: that were computed, of those asked for.
    """

    done: Mapping[int, Done] = field(default_factory=dict)
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    failed: frozenset[Slot] = frozenset()
    steps: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.done or self.hellos or self.failed or self.steps)

    def and_also(self, other: Report) -> Report:
        """One report of several ranks."""
        done = dict(self.done)
        for order_id, theirs in other.done.items():
            ours = done.get(order_id)
            done[order_id] = theirs if ours is None else ours.and_also(theirs)
        return Report(
            done,
            {**self.hellos, **other.hellos},
            self.failed | other.failed,
            self.steps | other.steps,
        )
