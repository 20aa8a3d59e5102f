"""Waits of requests for blocks: the state of a wait, and waiters that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kvtier.transfer import Transfer, Waiter
from kvtier.types import BlockId


class WaitState(IntEnum):
    """State of a wait. If several ranks wait for the same request, the greatest state counts."""

    OVER = 0
    """The request is looked up again, or computed."""
    READS = 1
    """Blocks are in flight to memory."""
    ANSWERS = 2
    """Look-ups in storage are in flight."""


OVER, READS, ANSWERS = WaitState


class Awaited(Protocol):
    """Something that a request waits for."""

    @property
    def is_over(self) -> bool:
        """Whether it has happened, or will never happen."""


@dataclass(slots=True, eq=False)
class Signal:
    """Flag that ends a wait. Its owner sets ``is_over``."""

    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of one request; ``state`` decides for every engine whether it continues.

    Attributes:
        until_s: time at which it ends in any case, by the caller's clock.
        reads: blocks in flight to memory.
        answers: look-ups in storage.
    """

    until_s: float
    reads: Sequence[Awaited] = ()
    answers: Sequence[Awaited] = ()

    def state(self, now_s: float) -> WaitState:
        """Return whether the request continues to wait, and for what. Changes nothing.

        The first answer ends the wait, since there may be more to read. While answers are missing,
        the end of the reads does not: the next look-up would wait for the same answer. Without
        look-ups, the wait ends when all reads have ended.
        """
        if now_s >= self.until_s:
            return OVER
        for answer in self.answers:
            if answer.is_over:
                return OVER
        if self.answers:
            return ANSWERS
        for read in self.reads:
            if not read.is_over:
                return READS
        return OVER


class StorageWaiter(Waiter):
    """Waiter that is over when none of its blocks is in flight to memory, or one has failed.

    waits_for_store: whether it waits for a block that the engine copies into memory itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits_for_store = False
        self._is_broken = False

    @property
    def is_over(self) -> bool:
        return self._is_broken or (self.ready and not self.waits_for_store)

    def take(self, transfer: Transfer, now: float) -> None:
        """Do nothing: the request is looked up again afterwards."""

    def failed(self, transfer: Transfer) -> None:
        self._is_broken = True
        self.forget_transfers()


class StorageWaiters:
    """Waiters for blocks that the engine itself copies into memory, which no transfer reports.

    A waiter is registered for one block, the last of its prompt, which usually arrives last. So a
    store of any other block costs nothing, even if hundreds of requests wait for the same prompt.
    """

    def __init__(self) -> None:
        self._waiters: dict[BlockId, list[StorageWaiter]] = {}

    def add(self, waiter: StorageWaiter, block: BlockId) -> None:
        """Keep ``waiter`` waiting until the store of ``block`` has ended."""
        self._waiters.setdefault(block, []).append(waiter)
        waiter.waits_for_store = True

    def ended(self, blocks: Sequence[BlockId]) -> None:
        """Note that the stores of these blocks have ended, successfully or not."""
        for block in blocks if self._waiters else ():
            for waiter in self._waiters.pop(block, ()):
                waiter.waits_for_store = False
