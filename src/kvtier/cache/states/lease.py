"""Leases of requests that begin from a state beside the KV of their prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.cache.lease import Lease
from kvtier.core.hot import Numbers
from kvtier.core.types import DEVICE, BlockId, Label, Match, Slot
from kvtier.index import PromptIndex


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Cached state that a cut needs beside the KV of its prefix.

    num_blocks: number of the prompt's blocks before it.
    match: its own blocks, all of which are ready in some tier.
    """

    num_blocks: int
    match: Match

    @property
    def is_on_device(self) -> bool:
        """Whether nothing of it has to be loaded."""
        return all(tier == DEVICE for tier in self.match.tiers)


@dataclass(frozen=True, slots=True)
class SnapshotMatch(Match):
    """Blocks of a prompt up to its longest prefix with a snapshot.

    Attributes:
        snapshots: the longest prefixes with one, longest first.
        num_known: cached blocks of the prompt, those behind the last snapshot included.
    """

    snapshots: tuple[Snapshot, ...] = ()
    num_known: int = 0

    def on_device(self) -> SnapshotMatch:
        """Return the match without what would have to be loaded."""
        here = Match.on_device(self).num_blocks
        left = [
            snapshot
            for snapshot in self.snapshots
            if snapshot.is_on_device and snapshot.num_blocks <= here
        ]
        return self.with_snapshots(left)

    def with_snapshots(self, snapshots: Sequence[Snapshot]) -> SnapshotMatch:
        """Return the match with some of its snapshots."""
        end = snapshots[0].num_blocks if snapshots else 0
        return SnapshotMatch(
            self.blocks[:end],
            self.tiers[:end],
            self.in_flight[:end],
            self.num_asked,
            tuple(snapshots),
            self.num_known,
        )


class StateLease(Lease):
    """Blocks of one snapshot that a request begins from, or has made.

    owner: the request's lease.
    """

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: Match,
        now: float,
        owner: StatefulLease,
    ) -> None:
        super().__init__(index, namespace, labels, match, now)
        self._owner = owner

    def give_up(self, late: bool = False) -> None:
        super().give_up(late)
        if not self._owner.broken:
            self._owner.give_up(late)


class StatefulLease(Lease):
    """Lease whose prefix is reused together with a snapshot.

    Attributes:
        match: what was found.
        start: the snapshot that the request begins from, until it needs it no longer.
    """

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: SnapshotMatch,
        now: float,
    ) -> None:
        super().__init__(index, namespace, labels, match, now)
        self.match = match
        self.start: StateLease | None = None

    @property
    def ready(self) -> bool:
        return super().ready and (self.start is None or self.start.ready)

    def give_up(self, late: bool = False) -> None:
        super().give_up(late)
        if self.start is not None and not self.start.broken:
            self.start.give_up(late)

    @property
    def start_slots(self) -> Sequence[Slot]:
        return () if self.start is None else self.start.slots


class SnapshotLease(StatefulLease):
    """Lease of a request of a model with recurrent layers.

    The slots behind the request's own ``num_blocks`` are for the snapshots that it is to make.

    Attributes:
        num_blocks: slots of the request's KV; 0 before it has any.
        points: numbers of blocks after which the engine has to write a snapshot, ascending.
        made: snapshots that the request has made.
    """

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: SnapshotMatch,
        now: float,
        blocks_per_snapshot: int,
    ) -> None:
        super().__init__(index, namespace, labels, match, now)
        self.num_blocks = 0
        self.points: list[int] = []
        self.made: list[StateLease] = []
        self._size = blocks_per_snapshot

    def snapshot_slots(self, num_blocks: int) -> Sequence[Slot]:
        if num_blocks not in self.points:
            return ()
        first = self.num_blocks + self.points.index(num_blocks) * self._size
        return self.slots[first : first + self._size]

    def take_snapshot(self, num_blocks: int) -> Sequence[Slot]:
        """Return the slots of a snapshot that was written. They leave the lease."""
        slots = self.snapshot_slots(num_blocks)
        first = self.num_blocks + self.points.index(num_blocks) * self._size
        self.slots = Numbers.joined(self.slots[:first], self.slots[first + self._size :])
        self.points.remove(num_blocks)
        return slots


MAX_UNCOMMITTED = 16
"""Cells that a request has written and can't commit, because others are filling the same blocks."""


class WindowLease(StatefulLease):
    """Lease of a request of a model with windows.

    Attributes:
        ring: slots of the window KV of its last tokens, which it overwrites in turn.
        cells: slots of cells that the engine has written and not committed, by the number of blocks
            before them.
        made: blocks of cells that it has committed, by that number, until they are freed.

    allocate: returns the slots of a cell; None if there is no room.
    end_start: called when the request needs ``start`` no longer.
    """

    def __init__(
        self,
        index: PromptIndex,
        namespace: bytes,
        labels: Sequence[Label],
        match: SnapshotMatch,
        now: float,
        allocate: Callable[[], Sequence[Slot] | None],
        end_start: Callable[[WindowLease], object],
    ) -> None:
        super().__init__(index, namespace, labels, match, now)
        self.ring: Sequence[Slot] = ()
        self.cells: dict[int, Sequence[Slot]] = {}
        self.made: dict[int, Sequence[BlockId]] = {}
        self._allocate = allocate
        self._end_start = end_start

    @property
    def reserved_slots(self) -> Sequence[Slot]:
        return Numbers.joined(super().reserved_slots, self.ring, *self.cells.values())

    def snapshot_slots(self, num_blocks: int) -> Sequence[Slot]:
        """Return where to write the cell before ``num_blocks``; empty if there is no room for it.

        They are allocated by the first call. A request keeps few cells that it can't commit.
        """
        is_wanted = not self.is_private and len(self.cells) < MAX_UNCOMMITTED
        if num_blocks not in self.cells and is_wanted:
            slots = self._allocate()
            if slots is not None:
                self.cells[num_blocks] = slots
        return self.cells.get(num_blocks, ())

    def has_begun(self) -> None:
        self._end_start(self)
