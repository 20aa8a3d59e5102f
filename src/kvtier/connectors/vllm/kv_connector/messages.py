"""Messages between the scheduler's half and the ranks, carried in vLLM's connector metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cache.transfer.ranks import RankOrder, Report
from kvtier.connectors.vllm.shared.copies import BlockSlots, PageRange


@dataclass(frozen=True, slots=True)
class PageJob:
    """A copy job of one request: pages of each KV group, and the slots of their blocks."""

    job_id: int
    request_id: str
    pages: Sequence[PageRange]
    slots: BlockSlots


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Message from the scheduler's half to all ranks, one for each step.

    Attributes:
        loads: Copies to pages, which begin at once.
        stores: Copies from pages, which begin after the step's KV has been computed.
        orders: Transfers between host memory and storage.
        finishing: Requests that have finished while stores of their pages may be in flight.
        step: Number of the step if the ranks report its end, else None.
        computes: Whether the model runs in this step.
        waits: Whether all copies in flight must end before anything else begins.
        weights: How often the weights were replaced, as far as the scheduler's half knows.
    """

    loads: Sequence[PageJob] = ()
    stores: Sequence[PageJob] = ()
    orders: Sequence[RankOrder] = ()
    finishing: Sequence[str] = ()
    step: int | None = None
    computes: bool = True
    waits: bool = False
    weights: int = 0


NOTHING = StepMessage()
"""Message of a step that computes, and in which nothing begins: the same object each time."""


@dataclass(slots=True)
class RankMessage:
    """Message from one or more ranks to the scheduler's half.

    Attributes:
        report: Ended orders, failed slots and the state of the ranks' tiers.
        ended: Number of ranks on which each copy job has ended, by job id.
        load_bytes: Size of each load that has ended.
        load_s: Seconds that these loads took in total.
        store_bytes: Size of all stores that have ended.
        store_s: Seconds that these stores took in total.
        layouts: Digests of the page layout of ranks that have registered their KV caches.
        failed: Requests of loads that failed, where vLLM has no other way to report them.
    """

    report: Report = field(default_factory=Report)
    ended: Counter[int] = field(default_factory=Counter)
    load_bytes: list[int] = field(default_factory=list)
    load_s: float = 0.0
    store_bytes: int = 0
    store_s: float = 0.0
    layouts: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    def and_also(self, other: RankMessage) -> RankMessage:
        """Return the messages of both as one."""
        return RankMessage(
            self.report.and_also(other.report),
            self.ended + other.ended,
            [*self.load_bytes, *other.load_bytes],
            self.load_s + other.load_s,
            self.store_bytes + other.store_bytes,
            self.store_s + other.store_s,
            self.layouts | other.layouts,
            self.failed | other.failed,
        )
