"""``BlockCache``, the cache of an engine that brings keys: read this file first.

    lookup --> promote, while the request waits --> hold --> the engine copies --> release
    reserve --> the engine copies --> commit, or abort

Keys are the engine's, as bytes. A key identifies a whole prefix. The engine copies from and to one
memory, in slots that the cache names; everything below is storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from kvtier.cache.audit import ComputedBlocks
from kvtier.cache.guard import SlotGuard
from kvtier.cache.ladder import CostMetrics
from kvtier.core.hints import Hint, HintResult
from kvtier.core.types import Slot
from kvtier.observe import Metrics
from kvtier.plan import Costs
from kvtier.plan.decide import Awaited

Answer_co = TypeVar("Answer_co", bound=Awaited, covariant=True)


class BlockState(IntEnum):
    """State of a block, as a look-up found it. Its number is its code where there are many."""

    NOWHERE = 0
    ARRIVING = 1
    """Being copied into memory."""
    MEMORY = 2
    STORAGE = 3
    UNKNOWN = 4
    """A look-up of the block in storage is in flight, or storage is still recovering its blocks."""


class BlockLookup(NamedTuple, Generic[Answer_co]):
    """Result of a look-up.

    states: of each block, in the order of the keys. answers: look-ups in storage that are worth
    waiting for. While there are any, a block that may be in storage is ``UNKNOWN``.
    """

    states: list[BlockState]
    answers: Sequence[Answer_co]


@dataclass(frozen=True, slots=True)
class Held:
    """Slots of blocks that can't be evicted, to copy from.

    guard: how the copy is checked after it; None if no other process uses the memory.
    """

    slots: Sequence[Slot]
    guard: SlotGuard | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots for new blocks, to copy to.

    keys, slots: of the new blocks. evicted: keys of the blocks evicted for them. guard: names the
    memory; None if no other process uses it.
    """

    keys: Sequence[bytes]
    slots: Sequence[Slot]
    evicted: list[bytes]
    guard: SlotGuard | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that entered a tier, or left it."""

    keys: list[bytes]
    tier: str
    is_removed: bool


class TierUsage(NamedTuple):
    """Numbers of slots of a tier: in use, and open so far."""

    num_used: int
    num_open: int


class BlockCache(ABC):
    """Cache of blocks by an engine's keys. Owned by one thread.

    The caller guarantees
        that one thread calls; that keys have one length; that ``hold`` names blocks that the last
        look-up found in memory, before the next ``poll``; that each ``hold`` is followed by one
        ``release``, and each block of ``reserve`` by ``commit`` or ``abort``, once its copy has
        ended on every rank.
    The implementer provides
        a value for each attribute below, and the methods. A slot is not reused while an engine
        copies from it or to it. A block is found only after its ``commit``.
    Outcomes and errors
        No method raises because of a tier, a process or a connection: a block that can't be had is
        ``NOWHERE``, and a block that can't be kept gets no slot. ``poll`` notices what has ended
        meanwhile; nothing else waits, except ``close``.

    Attributes:
        metrics: counters and gauges.
        costs: predicted and actual costs, learned from copies and prefill.
        learns: whether a policy learns from requests.
        computed: when this process computed blocks; None if nothing asks for their age.
    """

    metrics: Metrics
    costs: CostMetrics
    learns: bool
    computed: ComputedBlocks | None = None

    # -- look-ups ----------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], has_gaps: bool = False) -> BlockLookup[Awaited]:
        """Look up a prompt's blocks, also in storage. Blocks found in storage count as used.

        Args:
            keys: the blocks of one prompt, in its order.
            has_gaps: whether blocks behind a missing one may be of use.
        """

    @abstractmethod
    def lookup_again(self, key: bytes, before: BlockState | None = None) -> BlockState:
        """Return the state of one block of a prompt that was looked up already.

        before: the state that was found; None if it is not remembered. It is returned where it
        can't have changed for the better.
        """

    @abstractmethod
    def lookup_private(self, keys: Sequence[bytes]) -> list[BlockState]:
        """Return the states of blocks that are not shared with other processes, nor stored.

        Such a block is committed with ``to_storage=False``.
        """

    @abstractmethod
    def sources(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier that each block would be read from now: memory, or a storage tier."""

    def age_s(self, key: bytes) -> float | None:
        """Return the seconds since this process computed a block; None if that is not known."""
        return None

    @abstractmethod
    def origins(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier that each block in memory was read from. Memory after its first use."""

    # -- the engine's copies -----------------------------------------------------------------------

    @abstractmethod
    def hold(self, keys: Sequence[bytes]) -> Held:
        """Return the slots of blocks in memory, to copy from. They are held until ``release``."""

    @abstractmethod
    def release(self, keys: Collection[bytes]) -> None:
        """Release blocks whose copies have ended. Unknown ones are skipped."""

    @abstractmethod
    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        """Reserve slots for those of ``keys`` that are new. Return None if there is no room.

        The blocks count as used. keys: in prompt order; the first ones are evicted last.
        """

    @abstractmethod
    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """Note that blocks have been copied into their slots: they are found from now on.

        Blocks whose copy was distrusted, and blocks that were cleared meanwhile, are skipped.

        Args:
            keys: in prompt order.
            depths: position of each block in its prompt.
            to_storage: whether the blocks may be stored, and shared with other processes.
        """

    @abstractmethod
    def abort(self, keys: Iterable[bytes]) -> None:
        """Give up blocks that were not copied into their slots."""

    @abstractmethod
    def distrust(self, slots: Collection[Slot]) -> None:
        """Give up the held or reserved blocks in slots for which a copy failed."""

    @abstractmethod
    def end_copies(self) -> None:
        """Forget all holds and reservations, whose ends will not be reported."""

    @abstractmethod
    def copies_have_ended(self) -> None:
        """Note that all copies that ``end_copies`` forgot have ended on every rank."""

    # -- storage -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def storages(self) -> Sequence[str]:
        """The storage tiers, fastest first."""

    @abstractmethod
    def promote(self, keys: Sequence[bytes], ready_keys: Sequence[bytes] = ()) -> int:
        """Begin to read blocks from storage into memory.

        If there is no room for all, only the first ones are read. Returns how many.

        ready_keys: blocks of the same prompt in memory, which must not be evicted for these.
        """

    @abstractmethod
    def probe(self, keys: Sequence[bytes]) -> None:
        """Read a few of the blocks that a request computes although storage has them.

        No request waits for them. The reads show how long storage takes now; see
        ``kvtier.plan.probe``.

        keys: in prompt order.
        """

    @abstractmethod
    def wait_for_reads(self, keys: Sequence[bytes]) -> Awaited:
        """Return a signal that is over when none of the blocks is in flight to memory."""

    @abstractmethod
    def cost_snapshot(self) -> Costs:
        """Return current costs of copies and prefill, including the queued work."""

    # -- use, from which policies learn ------------------------------------------------------------

    @abstractmethod
    def on_request(self, keys: Iterable[bytes]) -> None:
        """Report a new request, once, before anything is reserved for it.

        keys: all blocks of its prompt, in its order.
        """

    @abstractmethod
    def continues(self, keys: Iterable[bytes], last_key: bytes) -> None:
        """Report that an answer's blocks follow the block ``last_key``."""

    @abstractmethod
    def touch(self, keys: Collection[bytes]) -> None:
        """Note a use of blocks, in prompt order. The first ones are evicted last."""

    @abstractmethod
    def hint(self, keys: Collection[bytes], hint: Hint, block_size: int) -> Sequence[HintResult]:
        """Apply a hint to a prompt's blocks, from now on. Return the result of each action.

        A prefetch begins in a later ``poll``, so that it ends in time; it applies until the next
        ``on_request`` of a prompt that begins with these blocks, or ends with its time. A demotion
        applies to blocks that nothing holds. block_size: tokens per block.
        """

    @abstractmethod
    def wait(self, keys: Collection[bytes], is_waiting: bool) -> None:
        """Note that a request has been queued (True), or is queued no longer (False).

        Call it once with each value per request.
        """

    # -- upkeep ------------------------------------------------------------------------------------

    @abstractmethod
    def poll(self) -> None:
        """Notice what has ended. Called once per step of the engine."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether ``poll`` has work to do soon, even if no request comes."""

    @abstractmethod
    def take_changes(self) -> list[Change]:
        """Return the blocks that entered or left this engine's tiers since the last call."""

    @abstractmethod
    def usage(self) -> Mapping[str, TierUsage]:
        """Return the slots of each tier of this engine's own. A node counts the slots it shares."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks of this engine, also in storage, and also held and reserved ones.

        The engine must not report the end of its copies. Where other engines share the blocks, the
        caller names its blocks differently from now on.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if slots, blocks and copies don't add up."""

    @abstractmethod
    def close(self) -> bool:
        """Finish what is in flight, and close the tiers that belong to the cache.

        Returns False if that takes too long; their memory must not be freed then. No copy of the
        engine's may be in flight.
        """
