"""The seam between deciding and doing: who carries blocks from tier to tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.plan import Route
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.storage import Outcome, StorageFacts
from kvtier.transfer.job import Job
from kvtier.types import BlockKey, BlockName, Slot


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to be copied from tier ``src`` to tier ``dst``; in the order of their prompt.

    src_slots, dst_slots: where they are, and are to go, in a memory tier; they mean nothing in
    storage. names: what they are called there; () between memory tiers.
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
    """A look-up. outcomes: one per key, once it is done without an error."""

    def __init__(self) -> None:
        super().__init__(0)
        self.outcomes: Sequence[Outcome] = ()

    @property
    def places_there(self) -> Sequence[int]:
        """Positions of the keys that were found; none where the look-up failed."""
        if self.error is not None:
            return []
        if self.outcomes.count(Outcome.THERE) == len(self.outcomes):
            return range(len(self.outcomes))
        return [at for at, outcome in enumerate(self.outcomes) if outcome is Outcome.THERE]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """A storage tier verified some blocks while it was idle."""

    tier: str
    num_bytes: int
    seconds: float
    num_damaged: int


class Mover(ABC):
    """Carries moves out, here or elsewhere; one thread calls.

    The caller guarantees
        slots of a move are touched by nobody else until its job is done; a block is not dropped
        while it is moved.
    The implementer provides
        jobs that become done, in time: ``lost`` names the blocks that did not arrive, ``gone``
        those of them that their source has not.
    Outcomes and errors
        nothing raises for what devices and storage do; the job tells.
    """

    storages: dict[str, StorageFacts]
    """The storage tiers by name, in the order of their speed."""
    tells_late: bool = False
    """Whether the job of a look-up says by itself that nobody should wait for it any more."""

    @abstractmethod
    def begin(self, move: Move, urgent: bool = True) -> Job:
        """Begin to copy. urgent: False for what nobody waits for yet; it lets others pass."""

    def accepts(self, route: Route) -> bool:
        """Whether a new move along ``route`` would be tried.

        Not while storage is left alone, for it failed again and again.
        """
        return True

    def breaker(self, tier: str) -> BreakerState:
        """Whether a storage tier is left alone: the worst of what is known, here and there."""
        return BreakerState.CLOSED

    def hurry(self, route: Route, job: Job) -> None:
        """Somebody waits for ``job`` now."""
        return

    def withdraw(self, route: Route, job: Job) -> bool:
        """Nobody wants ``job`` any more: True where it had not begun, and never will."""
        return False

    @abstractmethod
    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        """Ask a storage tier which of the first ``keys`` it has; done at once where it can."""

    def has_unfound(self, tier: str) -> bool:
        """Whether it may have blocks that nobody has found yet."""
        return False

    @abstractmethod
    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Storage need not keep these any more."""

    def drop_unfound(self, tier: str) -> None:
        """Nor what it has that nobody has found yet, for good."""
        return

    def queued_s(self, route: Route, copy_s: Callable[[int], float]) -> float:
        """Seconds until a new urgent move along ``route`` would begin.

        Infinite where it would be refused. copy_s: what a number of bytes takes.
        """
        return 0.0

    def is_idle(self, tier: str) -> bool:
        """Whether nothing is read from a storage tier, and nothing stands in line for it."""
        return True

    def scrub(self) -> list[Scrubbed]:
        """Have idle storage verify a little, now and then; what came of it since the last call."""
        return []

    @abstractmethod
    def close(self, timeout_s: float) -> set[str]:
        """Finish what was begun, as far as it ends in time.

        Returns the names of the tiers that are in use all the same: whoever owns them must leave
        them open.
        """
