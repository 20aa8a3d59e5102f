"""Look up prompts in storage: blocks of an earlier run, or of another process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvtier.cache.ladder.eviction import Eviction
from kvtier.cache.ladder.lookup_batch import FIRST_KEYS, Lookup, WantedBlocks
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.transfer import FindJob, Mover
from kvtier.core.types import BlockId, BlockKey, Slot, keys_of
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import LOOKUP_SECONDS
from kvtier.plan import CostModel
from kvtier.plan.worth import patience_s
from kvtier.tiers import Outcome

THERE, ABSENT, _, FAILED = Outcome
ABSENT_S = 5.0
"""Seconds for which storage is not asked again for a block that it did not have."""
MAX_ABSENT = 4096
"""Most prompts for which that is remembered."""

_Name = tuple[str, BlockKey]


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A look-up in storage that is in flight.

    Attributes:
        question: the keys that are looked up.
        job: the mover's job.
        began_s: when it began.
        is_over: whether it was answered, or is late. Waiting requests are then looked up again.
    """

    question: Lookup
    job: FindJob
    began_s: float = 0.0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class LookupPatience:
    """Limit of a request's wait for a look-up.

    Attributes:
        limit_s: the longest wait; storage that takes longer is late.
        costs: measured costs. A request waits for an answer no longer than computing would take.
        block_size: tokens per block; 0 if the cost of computing is not weighed.
    """

    limit_s: float
    costs: CostModel
    block_size: int

    def computing_s(self, first: int, end: int) -> float:
        """Return how long a prompt may wait before computing blocks ``first`` to ``end`` wins."""
        size = self.block_size
        return patience_s(self.costs.snapshot(), first * size, end * size) if size else inf


@dataclass(eq=False)
class StorageLookup:
    """Looks up keys in storage that the index does not know, and adopts the blocks that it has.

    An answer that does not come at once serves the requests that wait for it, and later requests
    with the same prefix.
    """

    topology: Topology
    index: BlockIndex
    mover: Mover
    transfers: Transfers
    eviction: Eviction
    patience: LookupPatience
    metrics: Metrics
    clock: Callable[[], float]
    # By storage and first key: each prompt has one look-up in flight per storage tier.
    _asked: dict[_Name, PendingLookup] = field(init=False, default_factory=dict)
    # until when it is not asked again
    _absent: OrderedDict[_Name, float] = field(init=False, default_factory=OrderedDict)
    # storage not waited for until it answers in time
    _late: set[str] = field(init=False, default_factory=set)
    # duration of the last first look-up
    _took_s: dict[str, float] = field(init=False, default_factory=dict)

    def unindexed(self, finds_at_once: bool | None = None) -> list[str]:
        """Return the storage tiers that may have blocks that the index does not know yet.

        finds_at_once: only tiers that answer look-ups at once (True), or only the others (False).
        """
        facts = self.mover.storages
        return [
            name
            for name in self.topology.storages
            if finds_at_once in (None, facts[name].finds_at_once) and self.mover.has_unindexed(name)
        ]

    # -- a prompt ---------------------------------------------------------------------------------

    def begin(
        self,
        storage: str,
        wanted: WantedBlocks,
        has_gaps: bool = False,
        num_before: int | None = None,
    ) -> PendingLookup | None:
        """Look up blocks of one prompt in a storage tier, or join the look-up in flight.

        On return the index knows the blocks of storage that answers at once. Other answers come
        later.

        Args:
            storage: the tier, one of ``unindexed``.
            wanted: the blocks, one or more.
            has_gaps: whether blocks behind a missing one may be of use.
            num_before: blocks of the prompt before these, if the wait for an answer is weighed
                against computing them. Answers that have arrived are processed then.

        Returns:
            The look-up; None if its answer is not worth waiting for.
        """
        (first,) = wanted.names(0, 1, None)
        is_known = (storage, first) in self._asked or self._is_absent((storage, first))
        asked = self._ask(Lookup(storage, wanted, has_gaps).next(1 if is_known else FIRST_KEYS))
        if num_before is None:
            return asked
        is_sooner = asked is not None and self._is_sooner(
            asked, num_before, num_before + len(wanted)
        )
        self.hear()
        return asked if is_sooner else None

    def _is_sooner(self, asked: PendingLookup, first: int, end: int) -> bool:
        """Whether the answer comes before blocks ``first`` to ``end`` could be computed."""
        if asked.job.done:
            return False
        usual_s = self._took_s.get(asked.question.storage, 0.0)
        return max(self.clock() - asked.began_s, usual_s) < self.patience.computing_s(first, end)

    def _ask(self, question: Lookup) -> PendingLookup | None:
        """Begin a look-up, or join the one in flight. None if its answer is not waited for."""
        name = (question.storage, question.name)
        if self._is_absent(name):
            return None
        asked = self._asked.get(name) or self._begin(question)
        if self.mover.storages[question.storage].finds_at_once:
            self._hear(asked)
            return None
        if not self.patience.limit_s or question.storage in self._late or self._give_up(asked):
            return None
        return asked

    def _is_absent(self, name: _Name) -> bool:
        return name in self._absent and self._absent[name] > self.clock()

    def _begin(self, question: Lookup, before: PendingLookup | None = None) -> PendingLookup:
        """Begin a look-up. before: the look-up that this one continues."""
        job = self.mover.find(question.storage, question.keys)
        asked = before or PendingLookup(question, job)
        asked.question, asked.job = question, job
        asked.began_s = self.clock()
        self._asked[question.storage, question.name] = asked
        return asked

    def _give_up(self, asked: PendingLookup) -> bool:
        """Stop waiting for this storage if its answer is late. Return whether it is."""
        is_late = asked.job.is_late or (
            not self.mover.tells_late and self.clock() - asked.began_s >= self.patience.limit_s
        )
        if asked.job.done or not is_late:
            return False
        asked.is_over = True
        self._late.add(asked.question.storage)
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether a look-up that ``hear`` may end is pending."""
        return any(not asked.is_over for asked in self._asked.values())

    def hear(self) -> None:
        """Process the answers that have arrived. ``Ladder.poll`` calls it, too."""
        for asked in list(self._asked.values()):
            self._hear(asked)

    def _hear(self, asked: PendingLookup) -> None:
        while asked.job.done:
            more = self._take_in(asked)
            if more is None or (more.storage, more.name) in self._asked:
                asked.is_over = True
                return
            goes_on = more.name == asked.question.name
            asked.is_over |= not goes_on
            asked = self._begin(more, asked if goes_on else None)
        self._give_up(asked)

    def _take_in(self, asked: PendingLookup) -> Lookup | None:
        """Process an answer. Return the next look-up of the prompt, if there is one."""
        question, job = asked.question, asked.job
        del self._asked[question.storage, question.name]
        add = partial(self._add_found, question.storage)
        more = question.take_in(job.places_there, add)
        if job.error is not None or FAILED in job.outcomes:
            more = None
        if not self.mover.storages[question.storage].finds_at_once and job.error is None:
            self._note_answer(question, job, is_last=more is None)
        return more

    def _note_answer(self, question: Lookup, job: FindJob, is_last: bool) -> None:
        """Measure an answer, and remember the first block that storage did not have."""
        storage = question.storage
        self.metrics.observe(LOOKUP_SECONDS, job.seconds, tier=storage)
        if len(question.keys) <= FIRST_KEYS:
            self._took_s[storage] = job.seconds
        # The duration, not the time of this call: an engine's step may lie between.
        if FAILED not in job.outcomes and job.seconds < self.patience.limit_s:
            self._late.discard(storage)
        missing = next(
            (at for at, outcome in enumerate(job.outcomes) if outcome is not THERE), None
        )
        lacked = question.missing
        if lacked is None and missing is not None and job.outcomes[missing] is ABSENT:
            lacked = question.keys[missing]
        if is_last and lacked is not None:
            self._absent[storage, lacked] = self.clock() + ABSENT_S
            while len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)

    def forget(self) -> None:
        """Forget the look-ups in flight: their answers are not adopted."""
        for asked in self._asked.values():
            asked.is_over = True
        self._asked.clear()
        self._absent.clear()

    def forget_keys(self, keys: Collection[BlockKey]) -> None:
        """Forget the look-ups in flight of these keys, which are deleted."""
        if not self._asked:
            return
        gone = set(keys)
        for name, asked in list(self._asked.items()):
            if not gone.isdisjoint(asked.question.keys):
                asked.is_over = True
                del self._asked[name]

    # -- blocks that are about to be written -----------------------------------------------------

    def adopt(self, blocks: Sequence[BlockId], storage: str) -> set[BlockId]:
        """Adopt those of ``blocks`` that storage recovered from an earlier run. Return them."""
        if not blocks or storage not in self.unindexed(finds_at_once=True):
            return set()
        keys = keys_of(self.index.names(blocks))
        found = [blocks[at] for at in self.mover.find(storage, keys).places_there]
        return set(found[: self._add_found(storage, found)])

    # -- what was found ---------------------------------------------------------------------------

    def _add_found(self, storage: str, blocks: Sequence[BlockId]) -> int:
        """Note in the index that ``storage`` has blocks, as far as it has room. Return how many."""
        states = self.index.states_of(blocks, storage)
        new = blocks
        if states.count(State.ABSENT) < len(states):
            new = [block for block, at in zip(blocks, states, strict=True) if at is State.ABSENT]
        allocator = self.topology.allocators[storage]
        self.eviction.make(storage, len(new) - allocator.num_free)
        slots = allocator.allocate(min(len(new), allocator.num_free)) or []
        self.transfers.found(new[: len(slots)], storage, slots)
        self._leave(storage, new[len(slots) :])
        return len(slots)

    def _leave(self, storage: str, blocks: Sequence[BlockId]) -> None:
        """Delete blocks that exceed the tier's room from storage.

        The index forgets them by a write that is begun and aborted.
        """
        if blocks:
            self.mover.drop(storage, keys_of(self.index.names(blocks)))
            self.index.begin_write(blocks, storage, [Slot(0)] * len(blocks))
            self.index.abort(blocks, storage)
