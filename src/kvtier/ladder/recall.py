"""What storage has kept of prompts since an earlier life, or has from another process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.index import BlockIndex, PromptIndex, State
from kvtier.keys import keys_along
from kvtier.ladder.row import Row
from kvtier.ladder.space import Space
from kvtier.ladder.traffic import Traffic
from kvtier.telemetry import Metrics
from kvtier.tiers import Outcome
from kvtier.transfer import FindJob, Mover
from kvtier.types import BlockId, BlockKey, Label, Slot, keys_of

THERE, ABSENT, _, FAILED = Outcome
FIRST_KEYS = 64
GROWTH = 16
MOST_KEYS = 4096
"""How many blocks storage is asked for at a time: few of a prompt of which it may have nothing, for
keys are hashed one after the other; more when it had them all. 4,096 keys take 2 ms."""
ABSENT_S = 5.0
"""So long storage that takes its time is not asked again for what it had not."""
MOST_ABSENT = 4096
"""Prompts of which that is remembered."""


@dataclass(frozen=True, slots=True)
class _Question:
    """Which blocks of a prompt from ``first`` on ``storage`` has, as many as there are keys.

    before: the key of the block in front of them, or the namespace; above: the block, None where
    there is none.
    """

    storage: str
    paths: PromptIndex
    namespace: bytes
    labels: Sequence[Label]
    first: int
    above: BlockId | None
    before: bytes
    keys: Sequence[BlockKey] = ()

    @property
    def num_left(self) -> int:
        """Blocks that were not asked for yet."""
        return len(self.labels) - self.first - len(self.keys)

    def next(self, above: BlockId | None, num_keys: int) -> _Question:
        """The same of the next blocks, behind those that were there."""
        first = self.first + len(self.keys)
        before = self.keys[-1] if self.keys else self.before
        keys = keys_along(self.namespace, self.labels, first, num_keys, before)
        return replace(self, first=first, above=above, before=before, keys=keys)


_Name = tuple[str, BlockKey]


@dataclass(slots=True)
class _Asked:
    """A question under way. began_s: when it was asked."""

    question: _Question
    job: FindJob
    began_s: float


class Recall:
    """Asks storage for the keys that the index does not know, and takes in what it has. Where a
    look-up takes its time, the answer is for those that wait for it, and for the next request that
    begins alike.

    patience_s: how long a request waits for an answer at most; storage that takes longer is late.
    computing_s: what computing a prompt's blocks from one up to another takes: an answer that takes
    as long is not waited for.
    """

    def __init__(
        self,
        row: Row,
        index: BlockIndex,
        mover: Mover,
        traffic: Traffic,
        space: Space,
        patience_s: float,
        computing_s: Callable[[int, int], float],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._row = row
        self._index = index
        self._mover = mover
        self._traffic = traffic
        self._space = space
        self._metrics = metrics
        self._clock = clock
        self._patience_s = patience_s
        self._computing_s = computing_s
        # By storage and the first key that was asked for: a prompt is asked for once at a time.
        self._asked: dict[_Name, _Asked] = {}
        self._absent: OrderedDict[_Name, float] = OrderedDict()  # until when it is not asked again
        self._late: set[str] = set()  # storage that nobody waits for, until it answers in time
        self._took_s: dict[str, float] = {}  # a first look-up, the last time

    @property
    def has_unfound(self) -> bool:
        """Whether storage may have blocks that nobody has found yet."""
        return any(self._mover.has_unfound(name) for name in self._row.storages)

    # -- a prompt ---------------------------------------------------------------------------------

    def ask(self, paths: PromptIndex, namespace: bytes, labels: Sequence[Label]) -> bool:
        """Ask every storage tier that may have more of this prompt than ``paths`` knows. Whether it
        is worth waiting for an answer."""
        is_asked = False
        for storage in self._row.storages:
            if not self._mover.has_unfound(storage):
                continue
            known = paths.match(namespace, labels).blocks
            above = known[-1] if known else None
            before = namespace if above is None else paths.key(above)
            nothing = _Question(storage, paths, namespace, labels[:], len(known), above, before)
            if nothing.num_left:
                is_asked |= self._ask(nothing.next(above, FIRST_KEYS), len(labels))
        self.hear()
        return is_asked

    def _ask(self, question: _Question, end: int) -> bool:
        """Whether a prompt of ``end`` blocks should wait for the answer."""
        name, now_s = (question.storage, question.keys[0]), self._clock()
        if self._absent.get(name, now_s) > now_s:
            return False
        if name not in self._asked:
            job = self._mover.find(question.storage, question.keys)
            self._asked[name] = _Asked(question, job, now_s)
        asked = self._asked[name]
        self._note_late(asked, now_s)
        if asked.job.done or question.storage in self._late:
            return False
        took_s = max(now_s - asked.began_s, self._took_s.get(question.storage, 0.0))
        return took_s < self._computing_s(question.first, end)

    def _note_late(self, asked: _Asked, now_s: float) -> None:
        if not asked.job.done and now_s - asked.began_s >= self._patience_s:
            self._late.add(asked.question.storage)

    def hear(self) -> None:
        """Take in what storage has answered by now, and note what it has not."""
        now_s = self._clock() if self._asked else 0.0
        for name, asked in list(self._asked.items()):
            self._note_late(asked, now_s)
            while asked.job.done:
                more = self._take_in(asked.question, asked.job)
                if more is None:
                    del self._asked[name]
                    self._note_absent(asked)
                    break
                asked.question, asked.job = more, self._mover.find(more.storage, more.keys)

    def _note_absent(self, asked: _Asked) -> None:
        """Storage has said what it has; behind that it has nothing for now."""
        storage, job = asked.question.storage, asked.job
        if self._mover.storages[storage].finds_at_once or job.error is not None:
            return
        # What it took, and not when it was heard: a step of the engine's may lie between.
        if FAILED not in job.outcomes and job.seconds < self._patience_s:
            self._late.discard(storage)
        missing = next((at for at, each in enumerate(job.outcomes) if each is not THERE), None)
        if missing is not None and job.outcomes[missing] is ABSENT:
            self._absent[storage, asked.question.keys[missing]] = self._clock() + ABSENT_S
            while len(self._absent) > MOST_ABSENT:
                self._absent.popitem(last=False)

    def _take_in(self, question: _Question, job: FindJob) -> _Question | None:
        """Blocks turned out to be there; those behind a gap, too, for what was found stays in
        storage until it is dropped. The next question, if there was no gap."""
        self._note_time(question, job)
        there = job.places_there
        if not there:
            return None
        num = there[-1] + 1
        path = self._path(question, num)
        question.paths.set_keys(path, question.keys[:num])
        found = path if len(there) == num else [path[at] for at in there]
        self._adopt(question.storage, found)
        if len(there) < len(question.keys) or not question.num_left:
            return None
        return question.next(path[-1], min(MOST_KEYS, GROWTH * len(there)))

    def _note_time(self, question: _Question, job: FindJob) -> None:
        storage = question.storage
        if not self._mover.storages[storage].finds_at_once and job.error is None:
            self._metrics.observe("kvtier_lookup_seconds", job.seconds, tier=storage)
            if len(question.keys) <= FIRST_KEYS:
                self._took_s[storage] = job.seconds

    def _path(self, question: _Question, num: int) -> Sequence[BlockId]:
        """The first ``num`` blocks that a question is about; what is in front of them may have
        been forgotten meanwhile."""
        first, labels, above = question.first, question.labels, question.above
        if above is None or self._is_known(above):
            rest = labels[first : first + num]
            return question.paths.extend(question.namespace, rest, above)
        return question.paths.extend(question.namespace, labels[: first + num])[first:]

    def _is_known(self, block: BlockId) -> bool:
        return any(self._index.state(block, name) is not State.ABSENT for name in self._row.rooms)

    # -- single blocks, where storage answers at once ---------------------------------------------

    def ask_each(
        self, keys: Sequence[BlockKey], make: Callable[[Sequence[int]], Sequence[BlockId]]
    ) -> int:
        """``ask`` for blocks by what they are called in storage. Returns how many are known now.

        make: the blocks at these positions of ``keys``, made known.
        """
        num_known = 0
        for name in self._row.storages:
            if self._is_asked_at_once(name):
                there = self._mover.find(name, keys).places_there
                num_known += self._adopt(name, make(there))
        return num_known

    @property
    def has_to_ask(self) -> bool:
        """Whether some storage takes its time to say what it has."""
        return any(not self._mover.storages[name].finds_at_once for name in self._row.storages)

    def begin(self, keys: Sequence[BlockKey]) -> list[tuple[str, FindJob]]:
        """Ask for single blocks the storage that takes its time. Returns who was asked, and what
        for an answer will come."""
        return [
            (name, self._mover.find(name, keys))
            for name in self._row.storages
            if not self._mover.storages[name].finds_at_once and self._mover.has_unfound(name)
        ]

    def take_in_each(
        self,
        answers: Sequence[tuple[str, FindJob]],
        make: Callable[[Sequence[int]], Sequence[BlockId]],
    ) -> int:
        """What was answered by now, as ``ask_each``."""
        return sum(self._adopt(name, make(job.places_there)) for name, job in answers if job.done)

    def were_there(self, blocks: Sequence[BlockId], storage: str) -> set[BlockId]:
        """Those of ``blocks`` that storage has had since an earlier life; the index knows it
        then."""
        if not blocks or not self._is_asked_at_once(storage):
            return set()
        keys = keys_of(self._index.names(blocks))
        found = [blocks[at] for at in self._mover.find(storage, keys).places_there]
        return set(found[: self._adopt(storage, found)])

    def _is_asked_at_once(self, storage: str) -> bool:
        return self._mover.storages[storage].finds_at_once and self._mover.has_unfound(storage)

    # -- what was found ---------------------------------------------------------------------------

    def _adopt(self, storage: str, blocks: Sequence[BlockId]) -> int:
        """Blocks were found: they are in ``storage`` from now on, as far as there is room for them.
        Returns how many."""
        states = self._index.states_of(blocks, storage)
        new = blocks
        if states.count(State.ABSENT) < len(states):
            new = [block for block, at in zip(blocks, states, strict=True) if at is State.ABSENT]
        room = self._row.rooms[storage]
        self._space.make(storage, len(new) - room.num_free)
        slots = room.allocate(min(len(new), room.num_free)) or []
        self._traffic.found(new[: len(slots)], storage, slots)
        self._leave(storage, new[len(slots) :])
        return len(slots)

    def _leave(self, storage: str, blocks: Sequence[BlockId]) -> None:
        """There is no room for blocks that were found: storage forgets them, and so does the index,
        by a write that does not come about."""
        if blocks:
            self._mover.drop(storage, keys_of(self._index.names(blocks)))
            self._index.begin_write_all(blocks, storage, [Slot(0)] * len(blocks))
            self._index.abort_all(blocks, storage)
