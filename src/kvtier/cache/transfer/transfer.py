"""A transfer in progress and its waiters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cache.transfer.job import Job
from kvtier.core.types import BlockId, BlockName, Slot


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks being copied from one tier to another.

    after: the transfer that brings the sources; it has to end before this one can begin.
    job: None until it begins.
    holds_source: whether the sources are leased in ``src`` until it is finished.
    followers: transfers that have this one as ``after``.
    waiters: notified when it ends, each with the positions in its prompt that this transfer brings.
    is_void: whether the blocks are no longer needed.
    names: names of the blocks in storage, if it reads or writes storage.
    dst_slots: target slots.
    number: position in the order in which transfers began.
    expected_s: expected duration when it began, without the queue; 0 if unknown.
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
    dst_slots: Sequence[Slot] = ()
    number: int = 0
    expected_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether it may never end, so that nothing should wait for it."""
        if self.job is None:
            return self.after is not None and self.after.is_late
        return self.job.is_late and not self.job.done


class Waiter(ABC):
    """Waits for transfers; is notified of each whether it arrived."""

    def __init__(self) -> None:
        self._waiting_for: set[Transfer] = set()

    @property
    def ready(self) -> bool:
        """Whether none of its transfers is in flight any more."""
        return not self._waiting_for

    @property
    def is_over(self) -> bool:
        """Whether the wait is over: ``ready``, unless a subclass waits for more, or for less."""
        return self.ready

    @property
    def waiting_for(self) -> frozenset[Transfer]:
        """The transfers that are still in flight."""
        return frozenset(self._waiting_for)

    def wait_for(self, transfer: Transfer, *positions: range) -> None:
        """Wait for ``transfer``: not ``ready`` before it has ended.

        positions: the blocks of its prompt that the transfer brings, if the waiter requests by
        position.
        """
        transfer.waiters.setdefault(self, []).extend(positions)
        self._waiting_for.add(transfer)

    def arrived(self, transfer: Transfer, now: float) -> None:
        """Note that the transfer's blocks have arrived."""
        self._waiting_for.discard(transfer)
        self.take(transfer, now)

    @abstractmethod
    def take(self, transfer: Transfer, now: float) -> None:
        """Hold the blocks that have arrived."""

    @abstractmethod
    def failed(self, transfer: Transfer) -> None:
        """Note that some of the transfer's blocks have not arrived."""

    def forget_transfers(self) -> list[Transfer]:
        """Stop waiting. Return the transfers that were waited for; they continue."""
        forgotten = list(self._waiting_for)
        for transfer in forgotten:
            del transfer.waiters[self]
        self._waiting_for.clear()
        return forgotten
