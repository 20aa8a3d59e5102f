"""Interface of storage tiers: blocks by key, in a medium that outlives the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.types import BlockKey, BlockName, Direct
from kvtier.devices.base import Finding, Memory
from kvtier.layout import KVGroup
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.pieces import Pieces

Keys = npt.NDArray[np.void]


class Outcome(Enum):
    """Outcome of one block of a call."""

    THERE = "there"
    """The block was found, written, or read; its bytes are verified."""
    ABSENT = "absent"
    """The tier has no such block."""
    DAMAGED = "damaged"
    """Wrong bytes were found under its key. The tier has dropped the block."""
    FAILED = "failed"
    """The medium could not be reached, or the deadline expired. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Properties of a storage tier that its callers rely on.

    reaches: kinds of memory that the tier reads into itself. Blocks for other memory pass through
        host memory.
    writes_from: kinds of memory that the tier writes from; None for the kinds in ``reaches``.
    direct: whether the tier reads directly into the fastest memory although it could read into a
        slower one: on, off, or auto (while the slower one is short of room).
    evicts: whether the tier evicts blocks by itself. If not, the caller of ``put`` drops blocks.
    is_shared: whether other processes use the tier, too. The tier then manages its total capacity,
        and ``num_blocks`` limits the blocks that this process knows of. A drop informs the other
        processes, which is slow, so a thread of its own calls it.
    takes_writes: whether blocks are written to the tier. If not, ``put`` stores none.
    finds_at_once: whether ``find`` answers from memory, never waits, and looks up every key.
    request_s: fixed cost of a call in seconds, without the cost of its bytes.
    wants_scrubbing: whether ``scrub`` can find damage before a block is requested.
    sizes_vary: whether the tier keeps blocks of any size, if its site asks for that.
    num_readers: maximum number of concurrent ``get`` calls.
    num_writers: maximum number of concurrent ``put`` calls.
    """

    reaches: frozenset[str] = frozenset({"host"})
    writes_from: frozenset[str] | None = None
    direct: Direct = Direct.OFF
    evicts: bool = False
    is_shared: bool = False
    takes_writes: bool = True
    finds_at_once: bool = False
    request_s: float = 0.0
    wants_scrubbing: bool = False
    sizes_vary: bool = False
    num_readers: int = 1
    num_writers: int = 1

    def can_write_from(self, kind: str) -> bool:
        """Return whether the tier writes blocks directly from memory of this kind."""
        return kind in (self.reaches if self.writes_from is None else self.writes_from)


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """Result of a scrub.

    num_damaged: blocks with wrong bytes. num_failed: blocks that could not be read.
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
    """Arguments from which a plug-in of ``kvtier.tiers`` makes a storage tier.

    name: name of the tier, for metrics and plans.
    location: text after the colon of ``storage="scheme:location"``, as the user wrote it.
    group: shape of the blocks.
    capacity_bytes: capacity of the tier.
    arena: host memory that most blocks are read into and written from, for tiers that register
        memory; None if there is none.
    coding: codec and keys, for kvtier's own tiers, whose formats name them. Blocks of other tiers
        are encoded and decoded outside, by ``CodedTier``.
    tenant: tenant in a node; "" for the default one.
    title: name of the engine for display in a node; "" if it has none.
    sizes_vary: whether blocks may be shorter than those of ``group``. A tier that can keep them
        says so by ``StorageFacts.sizes_vary``; others get blocks of full length. If it is False, a
        stored block of another length is damaged.
    """

    name: str
    location: str = field(repr=False)  # a password may be in it
    group: KVGroup
    capacity_bytes: int
    arena: Memory | None = None
    coding: CodingConfig = DEFAULT_CODING
    tenant: str = ""
    sizes_vary: bool = False
    title: str = ""


class KeptKeys:
    """Keys of the blocks that an earlier process has left, returned in ranges.

    Blocks that are gone meanwhile are left out. This implementation holds all keys in memory, for
    tiers with few blocks.
    """

    def __init__(self, keys: Sequence[BlockKey] = ()) -> None:
        self._keys = np.frombuffer(b"".join(keys), "V32")

    @property
    def num_keys(self) -> int:
        """Number of keys when this process began."""
        return len(self._keys)

    def in_order(self, start: int, end: int) -> Keys:
        """Return V32 [n]: the keys at ``start`` to ``end`` in the order of eviction."""
        return self._keys[start:end]

    @property
    def num_places(self) -> int:
        """Number of places that ``at`` accepts."""
        return self.num_keys

    def at(self, start: int, end: int) -> Keys:
        """Return V32 [n]: the keys in places ``start`` to ``end``.

        All places together have all keys, in the order that is fastest to read.
        """
        return self._keys[start:end]


class StorageTier(ABC):
    """Storage tier: finds, writes, reads and drops batches of blocks by key.

    The caller guarantees
        at most ``facts.num_readers`` threads call ``get``, and ``num_writers`` call ``put``. One
        thread calls ``drop`` if the tier ``is_shared``; one thread calls everything else. These
        calls may run concurrently. The memory of a call's blocks is alive, of a kind that ``facts``
        names, and not accessed by others until the call returns. A key appears once per call. No
        block is dropped while it is read or written.
    The implementer provides
        one outcome per block, in the order of the keys. After ``timeout_s`` a call begins no
        further work, and the remaining blocks have ``FAILED``; none is stored in part, and all may
        be requested again. A call returns only when none of its I/O is in flight, at ``timeout_s``
        or shortly after; the caller may reuse the memory then. A block that is ``THERE`` after
        ``get`` equals, bit for bit, the block that was put under that key: it was verified, or
        its bytes are trusted. A block that is ``THERE`` after ``put`` is found by the next process,
        too. ``num_blocks`` is a hard bound, unless the tier is shared.
        A block that was ``THERE`` in any call stays until it is dropped, unless the tier
        ``evicts``. Blocks that an earlier process left, and this one has not found yet, are evicted
        when their room is needed.
        Where sizes vary, the blocks of one ``put`` have one size, of at most ``bytes_per_block``.
        ``get`` has memory for ``bytes_per_block``, writes as many bytes as were put, and leaves the
        rest as it is.
    Outcomes and errors
        errors of the medium or the network are outcomes; only ``drop`` raises for them. An
        exception counts as ``FAILED`` for all blocks of the call. The constructor raises
        ``ConfigError`` for a location that can't be used.
    """

    name: str
    bytes_per_block: int
    facts: StorageFacts = StorageFacts()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Current capacity in blocks."""

    @property
    def has_unindexed(self) -> bool:
        """Whether the tier may have blocks that this process has neither put nor found."""
        return True

    @property
    def breaker(self) -> BreakerState:
        """State of the tier's own circuit breaker, if it has one. Any thread may read it."""
        return BreakerState.CLOSED

    @property
    def last_error(self) -> str:
        """Reason of the last failure, in a few words without a secret; "" if unknown.

        Any thread may read it.
        """
        return ""

    def unindexed_keys(self) -> list[BlockKey]:
        """Return the keys of unindexed blocks that the tier can name, in the order of eviction.

        For a caller that takes all of them, or drops all of them.
        """
        return []

    def lasting_keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that the next process would find, as far as it is known.

        Among them are dropped ones, unless they were dropped for good.
        """
        return self.unindexed_keys()

    def kept_keys(self) -> KeptKeys:
        """Return the keys of unindexed blocks, in ranges, so that few are in memory at once."""
        return KeptKeys(self.unindexed_keys())

    @abstractmethod
    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        """Return which blocks exist: ``THERE``, ``ABSENT``, or ``FAILED`` if unknown.

        Blocks after the first missing one may be reported as ``ABSENT`` without a lookup.
        """

    def num_known(self, keys: Sequence[BlockKey]) -> int | None:
        """Return how many of the first keys exist, without waiting and without any effect.

        None if the tier can't tell: ``find`` may wait, and may keep the blocks that it finds.
        """
        return None

    @abstractmethod
    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        """Write blocks, and return ``THERE`` or ``FAILED`` for each.

        A block that the tier has already need not be written.
        """

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        """Read blocks into ``blocks``, and verify them."""

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Drop blocks, and free their room. Ignore keys that the tier does not have.

        Raises an error if some blocks could not be dropped, or not in time. The caller then repeats
        the call with all keys.

        for_good: make sure that no later process finds the blocks, either.
        """

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify about ``max_bytes`` of blocks in the background.

        Each call continues where the last one ended. The same threading rules as for ``get`` apply.
        """
        del max_bytes
        return ScrubReport()

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return findings for ``kvtier doctor``."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. The tier is not used afterwards."""
