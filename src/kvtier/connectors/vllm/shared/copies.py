"""Copies between an engine's pages and host memory, as both halves of a front describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.cache.guard import SlotGuard
from kvtier.cache.transfer import Job
from kvtier.cache.transfer.ranks import RankOrder
from kvtier.connectors.common.paged_pool import GroupPages
from kvtier.connectors.common.recomputed import Comparison
from kvtier.connectors.vllm.shared.rank_weights import Look
from kvtier.core.errors import CacheError, TierError
from kvtier.core.types import DISK, Slot
from kvtier.devices import Direction
from kvtier.node.client.host import SlotMemory


@dataclass(frozen=True, slots=True)
class BlockSlots:
    """Locations of a copy's blocks: slots of the host tier, or direct reads from storage.

    Args:
        slots: of the blocks that pass through host memory, in the order of their keys.
        direct: positions, among all keys of the copy, of the blocks that do not.
        reads: orders to read these blocks to where they are used. The slots of an order are
            positions, too.
        guard: where the slots lie, and how a copy is checked, if they are a node's.
        audits: keys of blocks that a store compares with their slots in place of copying them
            there, by position among all keys. The guard's generations are theirs.
    """

    slots: Sequence[Slot]
    direct: Sequence[int] = ()
    reads: Sequence[RankOrder] = ()
    guard: SlotGuard | None = None
    audits: Mapping[int, bytes] = field(default_factory=dict)

    def by_block(self) -> Sequence[Slot | None]:
        """Return the slot of each block, None for a block that is read directly."""
        if not self.direct:
            return self.slots
        slots, direct = iter(self.slots), frozenset(self.direct)
        num_blocks = len(self.slots) + len(direct)
        return [None if at in direct else next(slots) for at in range(num_blocks)]


@dataclass(frozen=True, slots=True)
class BlocksToStore:
    """Blocks of a request for the ranks to store, or to compare with what is stored.

    Attributes:
        keys: in prompt order.
        slots: their slots.
        evicted: keys of the blocks evicted for them.
    """

    keys: Sequence[bytes] = ()
    slots: BlockSlots = field(default_factory=lambda: BlockSlots(()))
    evicted: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of one KV group, neighbours in a prompt.

    pages: ids on the device, in the order of the prompt. first: place of the first one within its
    block.
    """

    pages: Sequence[int]
    first: int = 0


def pages_with_slots(
    ranges: Sequence[PageRange], slots: BlockSlots, pages_per_block: int
) -> list[GroupPages]:
    """Return, by group, which pages belong to which of the slots.

    slots: one for each block that the ranges touch, group after group.
    """
    groups, at = [], 0
    by_block = slots.by_block()
    for range_ in ranges:
        num = len(range_.pages)
        num_blocks = -(-(range_.first + num) // pages_per_block) if num else 0
        groups.append(GroupPages(range_.pages, by_block[at : at + num_blocks], range_.first))
        at += num_blocks
    assert at == len(by_block), "slots that no page belongs to"
    return groups


@dataclass(frozen=True, slots=True, eq=False)
class SlotCheck:
    """Check of a load from a node's memory, or of a comparison with it, made afterwards.

    Attributes:
        now: int64 [num_slots], current generations of all slots; the node changes them.
        slots: int64 [num_copied], slots that were copied.
        then: int64 [num_copied], their generations when they were leased.
    """

    now: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    then: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, memory: SlotMemory, guard: SlotGuard | None, slots: Sequence[Slot]
    ) -> SlotCheck | None:
        """Return the check of slots that are read; None for a process's own memory."""
        if memory.generations is None or guard is None or not slots:
            return None
        then = np.asarray(guard.generations, np.int64)
        return cls(memory.generations, np.asarray(slots, np.int64), then)

    @property
    def holds(self) -> bool:
        """Whether the slots have held the same blocks all along."""
        return bool((self.now[self.slots] == self.then).all())


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy between vLLM's pages and host memory on one rank.

    slots: of host memory, that are copied from or to.

    job: of the device; None where nothing is copied. reads: from storage to vLLM's pages. check: of
    what is read in a node. look: at the weights, when the copy was submitted. audit: of blocks that
    a store compares.
    """

    direction: Direction
    slots: frozenset[Slot]
    job: Job | None
    reads: Sequence[Job] = ()
    check: SlotCheck | None = None
    look: Look | None = None
    audit: Comparison | None = None

    @property
    def _jobs(self) -> Sequence[Job]:
        return self.reads if self.job is None else [self.job, *self.reads]

    @property
    def done(self) -> bool:
        """Nothing of it touches vLLM's pages or held slots any more."""
        has_compared = self.audit is None or self.audit.job.done
        return has_compared and all(job.done for job in self._jobs)

    def wait(self) -> None:
        for job in self._jobs:
            job.wait()
        if self.audit is not None:
            self.audit.job.wait()

    @property
    def error(self) -> CacheError | None:
        """Why not all of it has arrived."""
        failed = next((job for job in self._jobs if not job.succeeded), None)
        if failed is None:
            return None
        return failed.error or TierError(DISK, "read", f"{len(failed.lost)} blocks did not arrive")
