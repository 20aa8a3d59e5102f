"""The seam between deciding and doing: a ``Mover`` copies blocks between tiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtier.cache.transfer.job import Job
from kvtier.core.types import BlockKey, BlockName, Slot
from kvtier.plan import Route
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.storage import Outcome, StorageFacts


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to be copied from tier ``src`` to tier ``dst``, in prompt order.

    src_slots, dst_slots: slots in a memory tier; ignored for storage.
    names: names of the blocks in storage; () between memory tiers.
    """

    src: str
    dst: str
    src_slots: Sequence[Slot]
    dst_slots: Sequence[Slot]
    names: Sequence[BlockName] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.src_slots)


class FindJob(Job):
    """A look-up. ``outcomes`` has one entry per key once the job is done without an error."""

    def __init__(self) -> None:
        super().__init__(0)
        self.outcomes: Sequence[Outcome] = ()

    @property
    def places_there(self) -> Sequence[int]:
        """Positions of the keys that were found; empty if the look-up failed."""
        if self.error is not None:
            return []
        if self.outcomes.count(Outcome.THERE) == len(self.outcomes):
            return range(len(self.outcomes))
        return [at for at, outcome in enumerate(self.outcomes) if outcome is Outcome.THERE]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """Result of a storage tier's verification of some blocks while it was idle."""

    tier: str
    num_bytes: int
    seconds: float
    num_damaged: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """Blocks that a warm start has copied into a storage tier."""

    tier: str
    num_blocks: int
    num_bytes: int


class Mover(ABC):
    """Carries moves out, in this process or elsewhere. Called from one thread.

    The caller guarantees
        nothing else accesses the slots of a move until its job is done; a block is not dropped
            while it is being moved.
    The implementer provides
        jobs that become done, in time: ``lost`` names the blocks that did not arrive, ``gone``
            those of them that their source does not have.
    Outcomes and errors
        errors of devices and storage are never raised; the job reports them.
    """

    storages: dict[str, StorageFacts]
    """The storage tiers by name, fastest first."""
    tells_late: bool = False
    """Whether a look-up's job sets ``is_late`` by itself."""

    @abstractmethod
    def begin(self, move: Move, urgent: bool = True) -> Job:
        """Begin to copy. urgent: False if nothing waits for it yet; urgent moves go first."""

    def accepts(self, route: Route) -> bool:
        """Whether a new move along ``route`` would be tried.

        False while the breaker of its storage is open.
        """
        return True

    def breaker(self, tier: str) -> BreakerState:
        """Return the breaker state of a storage tier: the worst one, locally and in other ranks."""
        return BreakerState.CLOSED

    def hurry(self, route: Route, job: Job) -> None:
        """Make ``job`` urgent: something waits for it now."""
        return

    def withdraw(self, route: Route, job: Job) -> bool:
        """Cancel ``job`` if it has not begun. Return whether it was cancelled."""
        return False

    def cancel(self, route: Route, jobs: Collection[Job]) -> bool:
        """Cancel reads from storage, urgent or not, if none has begun. Return whether."""
        return False

    @abstractmethod
    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        """Look up ``keys`` in a storage tier; the job is done at once where storage allows it."""

    def has_unindexed(self, tier: str) -> bool:
        """Whether the tier may have blocks that no look-up has found yet."""
        return False

    @abstractmethod
    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Let storage drop these blocks. for_good: it must not recover them after a restart."""

    def drop_unindexed(self, tier: str) -> None:
        """Drop, permanently, all blocks that no look-up has found yet."""
        return

    def queued_s(self, route: Route, copy_s: Callable[[int], float]) -> float:
        """Return the seconds until a new urgent move along ``route`` would begin.

        Infinite if the move would be refused. copy_s: duration of a copy by number of bytes.
        """
        return 0.0

    def is_idle(self, tier: str) -> bool:
        """Whether no read of a storage tier is running or queued."""
        return True

    def scrub(self) -> list[Scrubbed]:
        """Let idle storage verify some blocks. Return the results since the last call."""
        return []

    def warmed(self) -> Sequence[Warmed]:
        """Return what a warm start has copied since the last call."""
        return ()

    @abstractmethod
    def close(self, timeout_s: float) -> set[str]:
        """Finish what was begun, within the time limit.

        Returns the names of the tiers that are still in use; their owner must not close them.
        """
