"""Messages between the deciding process and the ranks about their storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtier.tiers.breaker import BreakerState
from kvtier.transfer.mover import Scrubbed
from kvtier.types import BlockName, Slot


class Verb(Enum):
    """Operations on blocks."""

    WRITE = "write"
    """From slots in memory to storage."""
    READ = "read"
    """From storage to slots in memory."""
    FIND = "find"
    """Say which of these storage has, where it has to be asked."""
    DROP = "drop"
    """Storage need not keep them."""
    ERASE = "erase"
    """Not in storage any more, not even after a restart."""
    HURRY = "hurry"
    """Somebody waits now for what an earlier order reads."""
    WITHDRAW = "withdraw"
    """Nobody wants any more what an earlier order reads."""
    DIGEST = "digest"
    """Say what was kept since an earlier life, as digests of buckets of keys."""
    LIST = "list"
    """Say the keys themselves, some with each report."""
    CLEAR = "clear"
    """Delete recovered blocks that nobody has requested, also from what a restart finds."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Every rank does the same with its shard of the same blocks.

    tier: the storage. names: the blocks. slots: theirs in memory, one per name, for ``WRITE`` and
    ``READ``; for a ``READ`` that comes with a load of the engine's, their places in that load.
    urgent: somebody waits for it. about: the order that is hurried or withdrawn.

    ranks: whom it is for; () for all. num: for ``DIGEST``, of buckets; for ``LIST``, of keys per
    report at most. buckets: how many there are, and a bit for each, the lowest one first, whose
    keys are to be listed; None for all keys.

    keys: for ``FIND``, one behind the other. patience_s: after which a ``FIND`` is late.
    """

    order_id: int
    verb: Verb
    tier: str
    names: tuple[BlockName, ...] = ()
    slots: tuple[Slot, ...] = ()
    urgent: bool = True
    about: int = 0
    ranks: tuple[int, ...] = ()
    num: int = 0
    buckets: tuple[int, bytes] | None = None
    keys: bytes = b""
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """An order to read, to write or to find that was carried out.

    failed: positions of blocks that were not moved, or found. gone: those of them that storage does
    not have; num_damaged: how many of these it had, but not as they were. num_ranks: where it has
    ended. num_bytes, seconds: what was moved, and how long it took without the time in line.
    withdrawn: it never began. is_late: somewhere it takes longer than anything should. Nobody
    should wait for it, and its slots in memory are in use until all ranks have ended.
    """

    failed: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    num_damaged: int = 0
    num_ranks: int = 1
    num_bytes: int = 0
    seconds: float = 0.0
    withdrawn: bool = False
    is_late: bool = False

    def and_also(self, other: Done) -> Done:
        """Combine the outcomes of two groups of ranks: done only if both are."""
        return Done(
            self.failed | other.failed,
            self.gone | other.gone,
            max(self.num_damaged, other.num_damaged),
            self.num_ranks + other.num_ranks,
            max(self.num_bytes, other.num_bytes),
            max(self.seconds, other.seconds),
            self.withdrawn or other.withdrawn,
            self.is_late or other.is_late,
        )


@dataclass(frozen=True, slots=True)
class RecoveredBlocks:
    """Blocks recovered by a rank's storage: their number, and their keys if they are few.

    The keys are concatenated; None means that they must be requested.
    """

    num_keys: int = 0
    keys: bytes | None = b""


@dataclass(frozen=True, slots=True)
class RecoveredKeys:
    """Keys in a rank's answer to ``DIGEST`` or ``LIST``.

    is_last: of the keys.
    """

    rank: int
    tier: str
    digests: bytes = b""
    keys: bytes = b""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """State of a rank; the last report counts.

    num_open: slots in memory that can be used by now. found: by storage tier, what a restart found
    there; only in a rank's first hello, and only where it has that storage. straight: the storage
    tiers that blocks can come from straight to where the engine uses them; in the same hello.
    num_blocks: by storage tier, how many blocks the rank has room for now.
    """

    num_open: int
    found: Mapping[str, RecoveredBlocks] | None = None
    straight: frozenset[str] = frozenset()
    num_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """From ranks, since their last report.

    done: by order id. hellos: by rank. failed: slots in memory from or to which a copy of the
    engine's went wrong. scrubbed: what was verified while storage was idle. steps: of the engine,
    that were computed, of those asked for. pieces: of what ranks have kept. breakers: by rank and
    storage tier, those that are another than before.
    """

    done: Mapping[int, Done] = field(default_factory=dict)
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    failed: frozenset[Slot] = frozenset()
    scrubbed: tuple[Scrubbed, ...] = ()
    steps: frozenset[int] = frozenset()
    pieces: tuple[RecoveredKeys, ...] = ()
    breakers: Mapping[tuple[int, str], BreakerState] = field(default_factory=dict)

    def __bool__(self) -> bool:
        told = (self.done, self.hellos, self.failed, self.scrubbed, self.steps, self.pieces)
        return any((*told, self.breakers))

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
            self.scrubbed + other.scrubbed,
            self.steps | other.steps,
            self.pieces + other.pieces,
            {**self.breakers, **other.breakers},
        )
