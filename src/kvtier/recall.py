"""What storage has kept of prompts since an earlier life, or has from another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.index import BlockIndex
from kvtier.keys import next_key
from kvtier.transfer import FindJob, Mover
from kvtier.types import BlockId, BlockKey, Label


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
    """Asks storage for the keys that the index does not know. Where a look-up takes its time, the
    answer is for the next request that begins alike."""

    def __init__(self, index: BlockIndex, mover: Mover) -> None:
        self._index = index
        self._mover = mover
        self._questions: list[_Question] = []

    def ask(self, namespace: bytes, labels: Sequence[Label]) -> None:
        """Ask every storage tier that may have more of this prompt than is known."""
        for storage in self._mover.storages:
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

    def take_answers(self) -> Iterator[tuple[str, list[BlockId]]]:
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
