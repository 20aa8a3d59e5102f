"""Messages between the two halves, which ride with those of vLLM's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.connectors.vllm.copies import BlockSlots, PageRange
from kvtier.transfer.ranks import RankOrder, Report


@dataclass(frozen=True, slots=True)
class PageJob:
    """A copy for one request: pages of each KV group, and the slots of their blocks."""

    job_id: int
    request_id: str
    pages: Sequence[PageRange]
    slots: BlockSlots


@dataclass(frozen=True, slots=True)
class StepMessage:
    """To all ranks, once a step.

    Args:
        loads: begin at once.
        stores: begin when the step's KV has been computed.
        orders: for the ranks' storage.
        finishing: requests that have finished while stores of their pages may run.
        step: number of the step, if its end is to be told.
        computes: whether the model runs in this step.
        waits: whether all copies that run have to end before anything else.
    """

    loads: Sequence[PageJob] = ()
    stores: Sequence[PageJob] = ()
    orders: Sequence[RankOrder] = ()
    finishing: Sequence[str] = ()
    step: int | None = None
    computes: bool = True
    waits: bool = False


@dataclass(frozen=True, slots=True)
class RankMessage:
    """From the ranks: copies that have ended, and what else they have to say.

    Args:
        ended: number of ranks on which each job has ended.
        load_bytes, load_s: sizes of loads that have ended, and the time that they took together.
        layouts: descriptions of a page's bytes, of ranks that have just registered their tensors.
    """

    report: Report
    ended: Counter[int] = field(default_factory=Counter)
    load_bytes: Sequence[int] = ()
    load_s: float = 0.0
    layouts: frozenset[str] = frozenset()

    def and_also(self, other: RankMessage) -> RankMessage:
        """Return what this rank and another one say together."""
        return RankMessage(
            self.report.and_also(other.report),
            self.ended + other.ended,
            [*self.load_bytes, *other.load_bytes],
            self.load_s + other.load_s,
            self.layouts | other.layouts,
        )
