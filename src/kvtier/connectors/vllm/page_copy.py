"""One of vLLM's copies in a rank: what a device copies of it, and what storage reads straight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.devices import Direction
from kvtier.errors import CacheError, TierError
from kvtier.transfer import Job
from kvtier.types import DISK, Slot


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy between vLLM's pages and host memory on one rank.

    slots: of host memory, that are copied from or to.

    job: of the device; None where nothing is copied. reads: from storage to vLLM's pages.
    """

    direction: Direction
    slots: frozenset[Slot]
    job: Job | None
    reads: Sequence[Job] = ()

    @property
    def _jobs(self) -> Sequence[Job]:
        return self.reads if self.job is None else [self.job, *self.reads]

    @property
    def done(self) -> bool:
        """Nothing of it touches vLLM's pages any more."""
        return all(job.done for job in self._jobs)

    def wait(self) -> None:
        for job in self._jobs:
            job.wait()

    @property
    def error(self) -> CacheError | None:
        """Why not all of it has arrived."""
        failed = next((job for job in self._jobs if not job.succeeded), None)
        if failed is None:
            return None
        return failed.error or TierError(DISK, "read", f"{len(failed.lost)} blocks did not arrive")
