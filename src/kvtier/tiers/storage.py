"""The seam of storage: blocks by key, in a place that outlives the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.pieces import Pieces
from kvtier.types import BlockKey, BlockName, Direct

Keys = npt.NDArray[np.void]


class Outcome(Enum):
    """Outcome of one block of a call."""

    THERE = "there"
    """Found; or its bytes are where they were to go, and are the right ones."""
    ABSENT = "absent"
    """The tier has no such block."""
    DAMAGED = "damaged"
    """Something else was found under its key. The tier has forgotten it."""
    FAILED = "failed"
    """Not now: it could not be reached, or came too late. Another time it may be there."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Facts about a tier that others need to use it well.

    reaches: kinds of memory that it reads into itself. writes_from: those that it writes from; None
    for the same. What lies elsewhere is copied to host memory first.
    direct: whether it reads directly into the fastest memory where there is a slower one that it
    could read into: on, auto (while that one is short of room) or off.
    evicts: it makes room by itself, so that blocks may go unasked; else whoever puts drops.
    is_shared: others use it, too: how much there is in all is its own business, and ``num_blocks``
    how many of them this process will know of. A drop tells others, which takes its time: it comes
    from a thread of its own.
    finds_at_once: ``find`` answers from memory, never waits, and looks for every key.
    request_s: what a call costs, beside what its bytes cost.
    wants_scrubbing: ``scrub`` finds damage before somebody needs the block.
    num_readers, num_writers: calls of ``get``, and of ``put``, that may run at a time.
    """

    reaches: frozenset[str] = frozenset({"host"})
    writes_from: frozenset[str] | None = None
    direct: Direct = Direct.OFF
    evicts: bool = False
    is_shared: bool = False
    finds_at_once: bool = False
    request_s: float = 0.0
    wants_scrubbing: bool = False
    num_readers: int = 1
    num_writers: int = 1

    def can_write_from(self, kind: str) -> bool:
        """Whether blocks in memory of that kind are written as they lie."""
        return kind in (self.reaches if self.writes_from is None else self.writes_from)


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """Result of a scrub.

    damaged: blocks with wrong bytes. failed: blocks that could not be read.
    """

    num_checked: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_failed: int = 0

    @classmethod
    def sum(cls, reports: Sequence[ScrubReport]) -> ScrubReport:
        """Add up the results of several scrubs."""
        return cls(
            sum(report.num_checked for report in reports),
            sum(report.num_bytes for report in reports),
            sum(report.num_damaged for report in reports),
            sum(report.num_failed for report in reports),
        )


@dataclass(frozen=True, slots=True)
class StorageSite:
    """Arguments that a plug-in of ``kvtier.tiers`` gets to make a storage tier.

    name: of the tier, for metrics and plans. location: what stands behind the colon of
    ``storage="scheme:location"``, as the user wrote it. group: the shape of the blocks.
    capacity_bytes: room for blocks. arena: host memory that most blocks come from and go to, for
    tiers that register memory; None where there is none.
    """

    name: str
    location: str = field(repr=False)  # a password may be in it
    group: KVGroup
    capacity_bytes: int
    arena: Memory | None = None


class KeptKeys:
    """Keys of the blocks that an earlier process has left, to be told piece by piece.

    Those that are gone meanwhile are left out.

    Of a tier with few blocks, or one that knows their keys in no better way.
    """

    def __init__(self, keys: Sequence[BlockKey] = ()) -> None:
        self._keys = np.frombuffer(b"".join(keys), "V32")

    @property
    def num_keys(self) -> int:
        """Return the number of keys when this process began."""
        return len(self._keys)

    def in_order(self, start: int, end: int) -> Keys:
        """V32 [n]: of those that leave ``start``-th to ``end``-th."""
        return self._keys[start:end]

    @property
    def num_places(self) -> int:
        """Return the limit of ``at``."""
        return self.num_keys

    def at(self, start: int, end: int) -> Keys:
        """V32 [n]: of those in places ``start`` to ``end``.

        All places have all keys, in an order that is quick to go through.
        """
        return self._keys[start:end]


class StorageTier(ABC):
    """Blocks by key: found, put, got and dropped, many at a time.

    The caller guarantees
        ``get`` is called by ``facts.num_readers`` threads at most, ``put`` by ``num_writers``,
        ``drop`` by one where it ``is_shared``, all else by one, at the same time if they like. The
        memory of a call's blocks is alive, of a kind that ``facts`` names, and touched by
        nobody else until the call returns. No key twice in a call; no block is dropped while it is
        got or put.
    The implementer provides
        an outcome per block, in the order asked for. When ``timeout_s`` is over nothing of a call
        is begun any more, and what is not done has ``FAILED``: never half there, it may be asked
        for again. A call has returned when nothing of it is under way any more, after ``timeout_s``
        or soon after; its memory belongs to others then. A block that is ``THERE`` after a
        ``get`` is the block that was put under that key, bit for bit: verified, or never doubtful.
        One that is ``THERE`` after a ``put`` is found by the next process, too. Room for
        ``num_blocks`` blocks is a hard bound, where it is not shared.
        A block that was ``THERE`` in any call stays until it is dropped, unless the tier
        ``evicts``; blocks that an earlier process has left, and nobody found yet, go when their
        room is needed.
    Outcomes and errors
        nothing raises for what the medium or the network does, but ``drop``; what does raise counts
        as ``FAILED`` for all blocks of the call. A location that can't be used is a ``ConfigError``
        at construction.
    """

    name: str
    bytes_per_block: int
    facts: StorageFacts = StorageFacts()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks that there is room for now."""

    @property
    def has_unfound(self) -> bool:
        """Whether it may have blocks that this process has neither put nor found."""
        return True

    @property
    def breaker(self) -> BreakerState:
        """Whether it leaves its medium alone by itself, for that failed again and again.

        From any thread.
        """
        return BreakerState.CLOSED

    @property
    def last_error(self) -> str:
        """Why a call has failed last, in a few words without a secret; "" where that is not known.

        From any thread.
        """
        return ""

    def unfound_keys(self) -> list[BlockKey]:
        """Those of them that it can name, the ones to leave first in front.

        For an owner that takes them all, or wants none of them.
        """
        return []

    def kept_keys(self) -> KeptKeys:
        """The same as they are needed one after the other: memory is that of a piece."""
        return KeptKeys(self.unfound_keys())

    @abstractmethod
    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        """Return which blocks exist: ``THERE``, ``ABSENT``, or ``FAILED`` if unknown.

        Those behind the first that is not there may be called ``ABSENT`` without a look.
        """

    @abstractmethod
    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        """Write blocks: ``THERE`` or ``FAILED``. One that is there already need not be written."""

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        """Read blocks into ``blocks``, and see that they are the right ones."""

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """The blocks are not needed any more: their room is free.

        for_good: no later process finds them, either. Keys that are not there are passed over.
        Raises where some of that could not be done, in time or at all: it is asked for again, of
        all keys.
        """

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify some blocks, about ``max_bytes`` of them, that nobody asked for.

        Each call goes on where the last one ended. Called like ``get``.
        """
        del max_bytes
        return ScrubReport()

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return findings for ``kvtier doctor``."""

    @abstractmethod
    def close(self) -> None:
        """Give files and connections back. Not used again."""
