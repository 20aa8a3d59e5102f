"""Messages between the deciding process and the ranks about their storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.cache.transfer.mover import Scrubbed, Warmed
from kvtier.core.types import BlockName, Slot
from kvtier.tiers.breaker import BreakerState


class Verb(Enum):
    """Operations on blocks."""

    WRITE = "write"
    """Copy from slots in memory to storage."""
    READ = "read"
    """Copy from storage to slots in memory."""
    FIND = "find"
    """Report which of these blocks storage has, if it has to be asked."""
    DROP = "drop"
    """Tell storage that it need not keep the blocks."""
    ERASE = "erase"
    """Drop the blocks permanently, even after a restart."""
    HURRY = "hurry"
    """Make an earlier read urgent: something waits for it now."""
    WITHDRAW = "withdraw"
    """Cancel an earlier read that is no longer needed."""
    DIGEST = "digest"
    """Report recovered keys as digests of buckets."""
    LIST = "list"
    """Report recovered keys, some with each report."""
    CLEAR = "clear"
    """Delete recovered blocks that nothing has requested, also from what a restart would find."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """An order. Every rank does the same with its shard of the same blocks.

    tier: the storage tier.
    names: the blocks.
    slots: their slots in memory, one per name, for ``WRITE`` and ``READ``. For a ``READ`` that
    comes with a load of the engine's: their positions in that load.
    urgent: whether something waits for it.
    about: the order to hurry or withdraw.
    ranks: the ranks that it is for; () for all.
    num: for ``DIGEST`` the number of buckets; for ``LIST`` the maximum number of keys per report.
    buckets: their number, and a bit for each, lowest first, of whose keys to list; None for all
    keys.
    keys: for ``FIND``, concatenated.
    patience_s: time after which a ``FIND`` is late.
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
    """Outcome of an order to read, write or find.

    failed: positions of blocks that were not moved, or not found.
    gone: those of ``failed`` that storage does not have, or has damaged.
    num_damaged: how many of ``gone`` are damaged.
    num_ranks: ranks in which the order has ended.
    num_bytes, seconds: bytes moved, and the duration without the time in the queue.
    withdrawn: whether it was cancelled before it began.
    is_late: whether it exceeded its time limit in some rank. Nothing should wait for it then, but
    its slots are in use until all ranks have ended.
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
        """Combine the outcomes of two groups of ranks: a block is done only if both are."""
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

    keys: concatenated; None if they must be requested.
    """

    num_keys: int = 0
    keys: bytes | None = b""


@dataclass(frozen=True, slots=True)
class RecoveredKeys:
    """Keys in a rank's answer to ``DIGEST`` or ``LIST``. is_last: no more keys follow."""

    rank: int
    tier: str
    digests: bytes = b""
    keys: bytes = b""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """State of a rank; its last report counts.

    num_open: slots in memory that can be used by now.
    found: recovered blocks by storage tier of this rank; only in the first hello.
    direct: storage tiers that can be read directly into the engine's memory; only in the first
    hello.
    num_blocks: blocks that the rank has room for now, by storage tier.
    """

    num_open: int
    found: Mapping[str, RecoveredBlocks] | None = None
    direct: frozenset[str] = frozenset()
    num_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of a recomputed block with the stored one; of several ranks, the greatest values.

    distances: of the stored block from the recomputed one, see ``kvtier.cache.audit``.
    apart: greatest distance of two computations of the block, neither of which was loaded; 0 if
    there was one only.
    """

    distances: npt.NDArray[np.float32]
    apart: float = 0.0

    def and_also(self, other: Compared) -> Compared:
        """Combine the comparisons of two ranks' shards of the block."""
        ours, theirs = self.distances, other.distances
        if ours.shape != theirs.shape:  # stages of a pipeline, with unlike layers
            ours, theirs = (each.max(axis=(0, 1), keepdims=True) for each in (ours, theirs))
        return Compared(np.maximum(ours, theirs), max(self.apart, other.apart))


Result = TypeVar("Result", Done, Compared)
Name = TypeVar("Name")


def joined(ours: Mapping[Name, Result], theirs: Mapping[Name, Result]) -> dict[Name, Result]:
    """Combine the results of two groups of ranks, by order or block."""
    both = {name: ours[name].and_also(theirs[name]) for name in ours.keys() & theirs.keys()}
    return {**ours, **theirs, **both}


@dataclass(frozen=True, slots=True)
class Report:
    """Reports of ranks since their last report.

    done: by order id.
    hellos: by rank.
    failed: slots in memory whose copy from or to the engine failed.
    scrubbed: results of verification by idle storage.
    steps: requested engine steps that were computed.
    pieces: recovered keys.
    breakers: breaker states that changed, by rank and storage tier.
    has_new_weights: whether a rank has noticed that the weights of its model were replaced.
    compared: recomputed blocks, by key; of each rank before its store is reported as ended.
    warmed: what warm starts have copied.
    """

    done: Mapping[int, Done] = field(default_factory=dict)
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    failed: frozenset[Slot] = frozenset()
    scrubbed: tuple[Scrubbed, ...] = ()
    steps: frozenset[int] = frozenset()
    pieces: tuple[RecoveredKeys, ...] = ()
    breakers: Mapping[tuple[int, str], BreakerState] = field(default_factory=dict)
    has_new_weights: bool = False
    compared: Mapping[bytes, Compared] = field(default_factory=dict)
    warmed: tuple[Warmed, ...] = ()

    def __bool__(self) -> bool:
        reported = (self.done, self.hellos, self.failed, self.scrubbed, self.steps, self.pieces)
        return any((*reported, self.breakers, self.has_new_weights, self.compared, self.warmed))

    def and_also(self, other: Report) -> Report:
        """Combine the reports of several ranks."""
        return Report(
            joined(self.done, other.done),
            {**self.hellos, **other.hellos},
            self.failed | other.failed,
            self.scrubbed + other.scrubbed,
            self.steps | other.steps,
            self.pieces + other.pieces,
            {**self.breakers, **other.breakers},
            self.has_new_weights or other.has_new_weights,
            joined(self.compared, other.compared),
            self.warmed + other.warmed,
        )
