"""Chunks in a slab, by the engine's own keys: what is there, what leaves, what is on its way.

vLLM's scheduler asks and must never wait: it owns the index, and two threads own the disk, one
that writes and one that reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from threading import Event

import numpy as np

from kvtier.connectors.vllm.chunks import ChunkState
from kvtier.connectors.vllm.identity import chunk_key
from kvtier.errors import TierError
from kvtier.tiers import Addresses, LoadResult, StorageTier
from kvtier.transfer.job import Job
from kvtier.transfer.lane import Lane
from kvtier.types import DISK, BlockName, Slot

PIECE_BYTES = 64 << 20
"""Written at a time, so that whoever closes does not wait for a long job."""
CLOSE_WAIT_S = 10.0
"""For stores that are queued when the slab is closed; the rest are dropped."""
NOWHERE: Addresses = np.empty(0, np.uint64)
END_WAIT_S = 90.0
"""For reads and writes under way; the disk tier's own deadlines come first."""


@dataclass(slots=True)
class Counts:
    """Chunks since the last ``take_counts``. refused: had no room, or came faster than the disk
    writes. over_budget: beyond the day's writes. lost: were damaged, or could not be read."""

    stored: int = 0
    loaded: int = 0
    found_again: int = 0
    evicted: int = 0
    refused: int = 0
    over_budget: int = 0
    failed: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that came to be in the slab, or left it."""

    keys: list[bytes]
    is_gone: bool


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """keys: of a load that are in place, or of a store that are in the slab now. is_whole: nothing
    failed. num_chunks: that were copied."""

    job_id: int
    is_load: bool
    keys: list[bytes]
    is_whole: bool
    num_chunks: int
    seconds: float


@dataclass(slots=True)
class _Chunk:
    slot: Slot
    is_ready: bool = False
    num_readers: int = 0

    @property
    def is_busy(self) -> bool:
        return not self.is_ready or self.num_readers > 0


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A job of vLLM's. num_missing: chunks that were asked for and are not there."""

    job_id: int
    keys: list[bytes]
    chunks: list[_Chunk]
    names: list[BlockName]
    addresses: Addresses
    num_missing: int = 0


class ChunkSlab:
    """A storage tier as a cache: the chunk that was used least recently leaves first.

    digest: of the namespace that the chunks belong to; while it is empty nobody knows what they are
    called: none is found, and none is stored. most_queued: chunks that may wait for the
    disk; more are refused, since each of them holds room in host memory. tells_changes: whether
    ``take_changes`` is called.

    The caller guarantees
        one thread calls; the memory of a job stays as it is until the job is finished.
    Outcomes and errors
        nothing raises but ``close``. What can't be stored or loaded is named in ``FinishedJob``.
    """

    def __init__(
        self, tier: StorageTier, digest: bytes, most_queued: int, tells_changes: bool = True
    ) -> None:
        self._tier = tier
        self.digest = digest
        self._most_queued = max(1, most_queued)
        self._num_queued = 0
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()  # the least recently used first
        self._at_once: list[FinishedJob] = []
        self._num_open = 0
        self._tells_changes = tells_changes
        self._changes: list[Change] = []
        self._counts = Counts()
        self._give_up = Event()
        self._writer = Lane("slab store", partial(TierError, DISK, "store"))
        self._reader = Lane("slab load", partial(TierError, DISK, "load"))
        self._under_way: list[tuple[_Task, Job, bool]] = []  # and whether it is a load

    @property
    def num_chunks(self) -> int:
        """Chunks that are in the slab or on their way to it, without those that a restart found
        and nobody has asked for."""
        return len(self._chunks)

    @property
    def num_unclaimed(self) -> int:
        """Chunks that a restart found and nobody has asked for yet, of whatever model."""
        return self._tier.num_unclaimed

    @property
    def num_jobs(self) -> int:
        """Jobs that ``take_finished`` has not returned yet."""
        return self._num_open

    # -- what is there -----------------------------------------------------------------------------

    def find(
        self, key: bytes, following: Callable[[], Sequence[bytes]] | None = None
    ) -> ChunkState:
        """Whether ``key`` can be loaded. A chunk that a restart found is claimed by that.

        following: chunks that will be asked for next; they are claimed along with it, which is
        cheaper than one by one.
        """
        if not self._tier.can_load:
            return ChunkState.ABSENT
        chunk = self._chunks.get(key)
        if chunk is None and self._tier.num_unclaimed and self._claim([key]):
            chunk = self._chunks[key]
            if following is not None:
                self._claim([each for each in following() if each not in self._chunks])
        if chunk is None:
            return ChunkState.ABSENT
        return ChunkState.READY if chunk.is_ready else ChunkState.WRITING

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were used just now. The first ones, the beginning of a prompt, leave last."""
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def take_changes(self) -> list[Change]:
        """What came and left since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_counts(self) -> Counts:
        """What happened since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def _known(self, key: bytes) -> _Chunk | None:
        if key not in self._chunks and self._tier.num_unclaimed:
            self._claim([key])
        return self._chunks.get(key)

    def _claim(self, keys: Sequence[bytes]) -> int:
        """How many of them, from the first on, a restart has found."""
        slots = self._tier.claim([chunk_key(self.digest, key) for key in keys])
        claimed = list(keys[: len(slots)])
        for key, slot in zip(reversed(claimed), reversed(slots), strict=True):
            self._chunks[key] = _Chunk(slot, is_ready=True)
        self._counts.found_again += len(claimed)
        self._note(claimed, is_gone=False)
        return len(claimed)

    # -- jobs --------------------------------------------------------------------------------------

    def store(
        self, job_id: int, keys: Sequence[bytes], depths: Sequence[int], addresses: Addresses
    ) -> None:
        """Write chunks that are not there yet; the others count as used.

        depths: of each chunk, its position in the prompt. addresses: where its bytes begin.
        """
        self._num_open += 1
        at = {key: row for row, key in enumerate(keys)}
        new = [key for key in at if self._known(key) is None]
        self.touch(keys)
        slots = self._make_room(new, at)
        task = _Task(job_id, new[: len(slots)], [_Chunk(slot) for slot in slots], [], NOWHERE)
        if not slots:
            self._at_once.append(FinishedJob(job_id, False, [], True, 0, 0.0))
            return
        rows = [at[key] for key in task.keys]
        names = [
            BlockName(self.digest, depths[row], chunk_key(self.digest, keys[row])) for row in rows
        ]
        self._chunks.update(zip(reversed(task.keys), reversed(task.chunks), strict=True))
        self._num_queued += len(slots)
        task = replace(task, names=names, addresses=addresses[rows])
        job = self._writer.submit(partial(self._write, task), self._num_bytes(task))
        self._under_way.append((task, job, False))

    def load(self, job_id: int, keys: Sequence[bytes], addresses: Addresses) -> None:
        """Read chunks to ``addresses``. Those that are not there fail, and no others with them."""
        self._num_open += 1
        self.touch(keys)
        there: list[int] = []
        chunks: list[_Chunk] = []
        for at, key in enumerate(keys):
            chunk = self._known(key)
            if chunk is not None and chunk.is_ready:
                chunk.num_readers += 1
                there.append(at)
                chunks.append(chunk)
        if not there:
            self._at_once.append(FinishedJob(job_id, True, [], not keys, 0, 0.0))
            return
        held = [keys[at] for at in there]
        names = [BlockName(self.digest, 0, chunk_key(self.digest, key)) for key in held]
        num_missing = len(keys) - len(held)
        task = _Task(job_id, held, chunks, names, addresses[there], num_missing)
        job = self._reader.submit(partial(self._read, task), self._num_bytes(task))
        self._under_way.append((task, job, True))

    def _num_bytes(self, task: _Task) -> int:
        return len(task.keys) * self._tier.bytes_per_block

    def take_finished(self) -> list[FinishedJob]:
        """Jobs that were finished since the last call. Their chunks can be found, or not, now."""
        finished, self._at_once = self._at_once, []
        ended = [each for each in self._under_way if each[1].done]
        self._under_way = [each for each in self._under_way if each not in ended]
        for task, job, is_load in ended:
            ok = [job.error is None and at not in job.lost for at in range(len(task.keys))]
            end = self._loaded if is_load else self._stored
            finished.append(end(task, ok, job.seconds))
        self._num_open -= len(finished)
        return finished

    def drain(self) -> None:
        """Wait until nothing is read or written any more. ``take_finished`` tells what became."""
        for _, job, _ in self._under_way:
            job.wait()

    def close(self) -> None:
        """Finish what is under way, and give the slab to its next owner.

        Stores that are still queued after ``CLOSE_WAIT_S`` are dropped. ``TierError`` where a read
        or a write does not end: the memory of the jobs must stay then.
        """
        if not self._writer.close(CLOSE_WAIT_S):
            self._give_up.set()
        for lane in (self._writer, self._reader):
            if not lane.close(END_WAIT_S):
                raise TierError("disk", "close", f"a read or write takes over {END_WAIT_S:.0f} s")
        self.take_finished()
        self._tier.close()

    def check_invariants(self) -> None:
        """Raise AssertionError where slots and chunks don't add up. Nothing may be under way."""
        slots = [chunk.slot for chunk in self._chunks.values()]
        assert len(set(slots)) == len(slots), "a slot holds two chunks"
        assert len(slots) <= self._tier.num_slots, "more chunks than slots"
        assert not any(chunk.is_busy for chunk in self._chunks.values()), "a chunk is still held"
        assert not self._num_queued, "chunks wait for nobody"

    # -- room --------------------------------------------------------------------------------------

    def _make_room(self, new: Sequence[bytes], wanted: Container[bytes]) -> list[Slot]:
        """Slots for the first of ``new``, as many as there is room for, after others have left."""
        may_store = self._tier.can_store and self.digest
        room = min(len(new), self._most_queued - self._num_queued) if may_store else 0
        missing = max(0, room - self._tier.num_free)
        leaving = self._oldest(missing, wanted)
        room -= missing - len(leaving)
        self._counts.refused += len(new) - room
        if not room:
            return []
        if not self._tier.num_welcome(room):
            self._counts.over_budget += room
            return []
        self._evict(leaving)
        # A slot that went bad does not come free with its chunk.
        while self._tier.num_free < room and (leaving := self._oldest(1, wanted)):
            self._evict(leaving)
        slots = self._tier.allocate(min(room, self._tier.num_free)) or []
        self._counts.refused += room - len(slots)
        return slots

    def _oldest(self, num: int, wanted: Container[bytes]) -> list[bytes]:
        """Up to ``num`` chunks that may leave, those that were used least recently."""
        may_leave = (
            key for key, chunk in self._chunks.items() if not chunk.is_busy and key not in wanted
        )
        return list(islice(may_leave, num))

    def _evict(self, keys: list[bytes]) -> None:
        if keys:
            self._tier.free([self._chunks.pop(key).slot for key in keys])
            self._counts.evicted += len(keys)
            self._note(keys, is_gone=True)

    # -- on the threads ----------------------------------------------------------------------------

    def _write(self, task: _Task, _: Job) -> Iterable[int]:
        done: list[bool] = []
        step = max(1, PIECE_BYTES // self._tier.bytes_per_block)
        for start in range(0, len(task.keys), step):
            piece = slice(start, start + step)
            names = task.names[piece]
            if self._give_up.is_set():
                done += [False] * len(names)
                continue
            slots = [chunk.slot for chunk in task.chunks[piece]]
            done += self._tier.store(names, slots, task.addresses[piece])
        return [at for at, is_stored in enumerate(done) if not is_stored]

    def _read(self, task: _Task, _: Job) -> Iterable[int]:
        keys = [name.key for name in task.names]
        slots = [chunk.slot for chunk in task.chunks]
        results = self._tier.load(keys, slots, task.addresses)
        return [at for at, result in enumerate(results) if result is not LoadResult.OK]

    # -- and what became of it ---------------------------------------------------------------------

    def _stored(self, task: _Task, ok: Sequence[bool], seconds: float) -> FinishedJob:
        stored = []
        for key, chunk, is_stored in zip(task.keys, task.chunks, ok, strict=True):
            if is_stored:
                chunk.is_ready = True
                stored.append(key)
            else:
                del self._chunks[key]
                self._tier.free([chunk.slot])
        self._num_queued -= len(task.keys)
        self._counts.stored += len(stored)
        self._counts.failed += len(task.keys) - len(stored)
        self._note(stored, is_gone=False)
        is_whole = len(stored) == len(task.keys)
        return FinishedJob(task.job_id, False, stored, is_whole, len(stored), seconds)

    def _loaded(self, task: _Task, ok: Sequence[bool], seconds: float) -> FinishedJob:
        loaded, lost = [], []
        for key, chunk, is_right in zip(task.keys, task.chunks, ok, strict=True):
            chunk.num_readers -= 1
            if is_right:
                loaded.append(key)
            elif self._chunks.get(key) is chunk:
                del self._chunks[key]
                lost.append(key)
            if not chunk.num_readers and self._chunks.get(key) is not chunk:
                self._tier.free([chunk.slot])
        self._counts.loaded += len(loaded)
        self._counts.lost += len(lost)
        self._note(lost, is_gone=True)
        is_whole = len(loaded) == len(task.keys) and not task.num_missing
        return FinishedJob(task.job_id, True, loaded, is_whole, len(loaded), seconds)

    def _note(self, keys: list[bytes], is_gone: bool) -> None:
        if self._tells_changes and keys:
            self._changes.append(Change(keys, is_gone))
