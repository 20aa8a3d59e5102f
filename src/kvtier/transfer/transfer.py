"""A transfer on its way, and who waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.transfer.job import Job
from kvtier.types import BlockId, BlockName, Slot


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks on their way from one tier to another.

    after: the transfer that brings the sources, and has to end before this one can begin.
    followers: those that come after this one.
    job: None until it begins. holds_source: the sources are leased in ``src`` until it is finished.
    waiters: who is told when it has ended, each with the positions in its prompt that this brings.
    is_void: what it brings is not wanted any more.
    names: what the blocks are called in storage, where they come from it or go to it. group: of
    layers, whose part of the blocks it is. dst_slots: where they go to. number: its place in the
    order in which transfers began. expected_s: what it was expected to take when it began, without
    the line; 0 where nobody could tell.
    """

    src: str
    dst: str
    blocks: Sequence[BlockId]
    after: Transfer | None = None
    job: Job | None = None
    holds_source: bool = False
    followers: list[Transfer] = field(default_factory=list)
    waiters: dict[Waiter, list[range]] = field(default_factory=dict)
    is_void: bool = False
    names: Sequence[BlockName] = ()
    group: int = 0
    dst_slots: Sequence[Slot] = ()
    number: int = 0
    expected_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """It may never end, and nobody should wait for it."""
        if self.job is None:
            return self.after is not None and self.after.is_late
        return self.job.is_late and not self.job.done


class Waiter(ABC):
    """Waits for transfers, and is told of each whether it arrived."""

    def __init__(self) -> None:
        self._waiting_for: set[Transfer] = set()

    @property
    def ready(self) -> bool:
        """Nothing that it waits for is on its way any more."""
        return not self._waiting_for

    @property
    def waiting_for(self) -> frozenset[Transfer]:
        """Return the blocks that are still in flight."""
        return frozenset(self._waiting_for)

    def wait_for(self, transfer: Transfer, *positions: range) -> None:
        """Not ready before ``transfer`` has ended.

        positions: which blocks of its prompt that brings, where it asks for them by position.
        """
        transfer.waiters.setdefault(self, []).extend(positions)
        self._waiting_for.add(transfer)

    def arrived(self, transfer: Transfer, now: float) -> None:
        """The transfer's blocks are where they were to go."""
        self._waiting_for.discard(transfer)
        self.take(transfer, now)

    @abstractmethod
    def take(self, transfer: Transfer, now: float) -> None:
        """Hold the blocks that have arrived."""

    @abstractmethod
    def failed(self, transfer: Transfer) -> None:
        """Not all of the transfer's blocks have arrived."""

    def forget_transfers(self) -> list[Transfer]:
        """Wait for nothing any more. The transfers go on; returns them."""
        forgotten = list(self._waiting_for)
        for transfer in forgotten:
            del transfer.waiters[self]
        self._waiting_for.clear()
        return forgotten
