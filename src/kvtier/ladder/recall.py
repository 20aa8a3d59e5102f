"""What storage has kept of prompts since an earlier life, or has from another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.index import BlockIndex, State
from kvtier.keys import next_key
from kvtier.ladder.row import Row
from kvtier.ladder.space import Space
from kvtier.ladder.traffic import Traffic
from kvtier.transfer import FindJob, Mover
from kvtier.types import BlockId, BlockKey, Label, Slot


@dataclass(frozen=True, slots=True)
class _Question:
    """Which blocks of a prompt after the first ``num_known`` ones ``storage`` has."""

    storage: str
    first_key: BlockKey
    namespace: bytes
    labels: Sequence[Label]
    num_known: int
    job: FindJob


class Recall:
    """Asks storage for the keys that the index does not know, and takes in what it has. Where a
    look-up takes its time, the answer is for the next request that begins alike."""

    def __init__(
        self,
        row: Row,
        index: BlockIndex,
        mover: Mover,
        traffic: Traffic,
        space: Space,
    ) -> None:
        self._row = row
        self._index = index
        self._mover = mover
        self._traffic = traffic
        self._space = space
        self._questions: list[_Question] = []

    @property
    def has_unfound(self) -> bool:
        """Whether storage may have blocks that nobody has found yet."""
        return any(self._mover.has_unfound(name) for name in self._row.storages)

    # -- a prompt ---------------------------------------------------------------------------------

    def ask(self, namespace: bytes, labels: Sequence[Label]) -> None:
        """Ask every storage tier that may have more of this prompt than is known."""
        for storage in self._row.storages:
            if not self._mover.has_unfound(storage):
                continue
            known = self._index.match(namespace, labels).blocks
            rest = labels[len(known) : len(labels)]
            if not rest:
                continue
            keys = self._keys(namespace, known, rest)
            if not self._is_asked(storage, keys[0]):
                job = self._mover.find(storage, keys)
                question = _Question(storage, keys[0], namespace, labels[:], len(known), job)
                self._questions.append(question)
        self.hear()

    def _is_asked(self, storage: str, first_key: BlockKey) -> bool:
        return any(
            each.storage == storage and each.first_key == first_key for each in self._questions
        )

    def _keys(
        self, namespace: bytes, known: Sequence[BlockId], rest: Sequence[Label]
    ) -> list[BlockKey]:
        key: bytes = self._index.key(known[-1]) if known else namespace
        keys = []
        for label in rest:
            keys.append(next_key(key, label))
            key = keys[-1]
        return keys

    def hear(self) -> None:
        """Take in what storage has answered by now."""
        for storage, blocks in self._take_answers():
            self._adopt(storage, blocks)

    def _take_answers(self) -> Iterator[tuple[str, list[BlockId]]]:
        """Storage tiers, and the blocks of a prompt that they turned out to have; those behind a
        gap, too, for what was found stays in storage until it is dropped."""
        answered = [each for each in self._questions if each.job.done]
        if answered:
            self._questions = [each for each in self._questions if not each.job.done]
        for each in answered:
            if there := each.job.places_there:
                end = each.num_known + there[-1] + 1
                path = self._index.extend(each.namespace, each.labels[:end])
                yield each.storage, [path[each.num_known + at] for at in there]

    # -- single blocks, where storage answers at once ---------------------------------------------

    def ask_each(self, namespace: bytes, labels: Sequence[Label], keys: Sequence[BlockKey]) -> int:
        """``ask`` for blocks that hang under no other. Returns how many are known now.

        keys: what the blocks are called in storage.
        """
        num_known = 0
        for name in self._row.storages:
            if self._is_asked_at_once(name):
                there = self._mover.find(name, keys).places_there
                blocks = [self._index.extend(namespace, [labels[at]])[0] for at in there]
                num_known += self._adopt(name, blocks)
        return num_known

    def was_there(self, block: BlockId, storage: str) -> bool:
        """Whether storage has had the block since an earlier life; the index knows it then."""
        if not self._is_asked_at_once(storage):
            return False
        is_there = bool(self._mover.find(storage, [self._key(block)]).places_there)
        return is_there and self._adopt(storage, [block]) == 1

    def _is_asked_at_once(self, storage: str) -> bool:
        return self._mover.storages[storage].finds_at_once and self._mover.has_unfound(storage)

    def _key(self, block: BlockId) -> BlockKey:
        return self._traffic.names_of([block])[0].key

    # -- what was found ---------------------------------------------------------------------------

    def _adopt(self, storage: str, blocks: Sequence[BlockId]) -> int:
        """Blocks were found: they are in ``storage`` from now on, as far as there is room for them.
        Returns how many."""
        states = self._index.states_of(blocks, storage)
        new = [block for block, state in zip(blocks, states, strict=True) if state is State.ABSENT]
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
            self._mover.drop(storage, [name.key for name in self._traffic.names_of(blocks)])
            self._index.begin_write_all(blocks, storage, [Slot(0)] * len(blocks))
            self._index.abort_all(blocks, storage)
