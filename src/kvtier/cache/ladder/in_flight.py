"""Transfers in flight, and the slot that each of them fills."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from kvtier.cache.transfer import Job, Transfer
from kvtier.core.hot import Numbers
from kvtier.core.types import Slot
from kvtier.tiers import SlotAllocator

POLL_BLOCKS = 2048
"""Blocks finished per poll. The engine waits meanwhile: this is about two milliseconds."""
LEAST_BLOCKS = 128
"""Blocks that a smaller transfer counts as, since each has a fixed cost."""


class InFlight:
    """Finds transfers by the slot they fill, and collects ended ones, without scanning the others.

    For each slot of a memory tier it keeps the number of the last transfer that was to fill it, in
    eight bytes. The number of a finished transfer is ignored.

    rooms: the memory tiers whose slots are looked up.
    on_end: see ``LadderCallbacks``.
    """

    def __init__(
        self, allocators: Mapping[str, SlotAllocator], on_end: Callable[[], object] | None = None
    ) -> None:
        self._filled_by = {
            name: np.zeros(allocator.num_slots, np.int64) for name, allocator in allocators.items()
        }
        self._transfers: dict[int, Transfer] = {}  # by number, the oldest first
        self._num_begun = 0
        self.by_route: Counter[tuple[str, str]] = Counter()
        """Number of transfers in flight by (source, destination)."""
        self._ended: deque[Transfer] = deque()  # filled by the threads that end jobs
        self._on_end = on_end

    @property
    def all(self) -> Collection[Transfer]:
        """All transfers in flight, the oldest first."""
        return self._transfers.values()

    def newest(self, num: int) -> list[Transfer]:
        """Return the last ``num`` transfers that began, in their order."""
        return list(islice(reversed(self._transfers.values()), num))[::-1]

    def add(self, transfer: Transfer) -> None:
        """Add a transfer that has begun, or that waits for another one."""
        self._num_begun += 1
        transfer.number = self._num_begun
        self._transfers[transfer.number] = transfer
        self.by_route[transfer.src, transfer.dst] += 1
        if transfer.dst in self._filled_by and transfer.dst_slots:
            self._filled_by[transfer.dst][_places(transfer.dst_slots)] = transfer.number

    def watch(self, transfer: Transfer, job: Job) -> None:
        """Note that a transfer's job has begun. ``take_ended`` yields it when the job is done."""
        transfer.job = job
        job.when_done(partial(self._note_end, transfer))

    def _note_end(self, transfer: Transfer) -> None:
        self._ended.append(transfer)
        if self._on_end is not None:
            self._on_end()

    def remove(self, transfer: Transfer) -> None:
        """Remove a finished transfer."""
        del self._transfers[transfer.number]
        self.by_route[transfer.src, transfer.dst] -= 1

    def take_ended(self) -> Iterator[Transfer]:
        """Yield unfinished transfers whose job is done, up to about ``POLL_BLOCKS`` blocks.

        A transfer that ends during the call is left for the next one.
        """
        num_blocks = 0
        for _ in range(len(self._ended)):
            if num_blocks >= POLL_BLOCKS:
                return
            transfer = self._ended.popleft()
            if transfer.number in self._transfers:
                num_blocks += max(LEAST_BLOCKS, len(transfer.blocks))
                yield transfer

    def filling(self, slots: Sequence[Slot], tier: str) -> Iterator[tuple[Transfer, range]]:
        """Yield the transfers that will fill ``slots``, each with its positions."""
        if not self._transfers or not slots:
            return
        numbers = self._filled_by[tier][_places(slots)]
        numbers[numbers < next(iter(self._transfers))] = 0
        edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, end in pairwise([0, *edges.tolist(), len(numbers)]):
            transfer = self._transfers.get(int(numbers[start]))
            if transfer is not None:
                yield transfer, range(start, end)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the oldest transfer is done. True if there is none; False on time-out."""
        job = next((each.job for each in self.all if each.job is not None), None)
        return job is None or job.wait(timeout_s)


def _places(slots: Sequence[Slot]) -> npt.NDArray[np.int64]:
    """Return ``slots`` as an array."""
    return np.asarray(Numbers(slots), np.int64)
