"""Asynchronous jobs between a storage tier and rows of an engine's host memory, by its own keys.

No call waits for the disk. The engine's host memory is the memory tier of the ladder. The engine
lends it a row for the duration of a job.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.connectors.common.holds import Holds
from kvtier.errors import ConfigError, TierError
from kvtier.index import State, make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.keyed.block_cache import BlockLookup, BlockState
from kvtier.keyed.cache import LocalBlockCache
from kvtier.ladder import LadderOptions, PendingLookup
from kvtier.plan import Copy
from kvtier.telemetry import Metrics
from kvtier.telemetry.specs import REFUSED_BLOCKS
from kvtier.tiers import LentMemory, MemoryTier, StorageTier
from kvtier.transfer import LocalMover
from kvtier.types import NO_BLOCK, BlockId, Slot

PIECE_BYTES = 16 << 20
"""Bytes per read or write, so that closing does not wait for a long job."""
LOOK_BLOCKS = 64
"""Blocks of a job whose states are queried together."""
DIGEST_BYTES = 32
"""Bytes of a namespace's digest, which storage keeps with each block."""
CLOSE_WAIT_S = 10.0
"""Longest wait for queued stores when the slab is closed; the rest are dropped."""
HELD_SHARE = 2
"""At most 1/HELD_SHARE of the blocks can be held, so that others can be evicted for stores."""
END_WAIT_S = 90.0
"""Longest wait for reads and writes in flight; the disk tier's own deadlines are shorter."""
THERE = bytes([State.READY])
"""Mark of a block that storage has, in the index's encoding."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupResult:
    """Result of a look-up in storage.

    Attributes:
        marks: per key, ``THERE`` if storage has the block. Searching bytes is faster than making an
            array.
        blocks: per key, the block in the index; ``NO_BLOCK`` if unknown.
    """

    marks: bytes
    blocks: Sequence[BlockId]

    @classmethod
    def nothing(cls, num_keys: int) -> LookupResult:
        """Return the result of a look-up that found nothing."""
        return cls(bytes(num_keys), [NO_BLOCK] * num_keys)

    @property
    def has_unknown(self) -> bool:
        """Whether the index does not know some of the blocks."""
        return NO_BLOCK in self.blocks

    @property
    def num_first(self) -> int:
        """Number of the first keys that storage has without a gap."""
        return len(self.marks) - len(self.marks.lstrip(THERE))

    def flags(self) -> list[bool]:
        """Return per key whether storage has it."""
        return [mark == THERE[0] for mark in self.marks]

    def first(self, num: int) -> Sequence[BlockId]:
        """Return the first ``num`` blocks, all of which storage must have."""
        return self.blocks[:num]

    def there(self) -> list[BlockId]:
        """Return the blocks that storage has."""
        return list(compress(self.blocks, self.flags()))


@dataclass(frozen=True, slots=True, eq=False)
class BlockStates:
    """State of blocks: bool [n] each.

    Attributes:
        blocks: the blocks in the index; ``NO_BLOCK`` if unknown.
        in_memory: whether each is in a lent row.
        moving: whether it is in flight between rows and storage, or queued for a write.
        stored: whether it is in storage.
    """

    blocks: Sequence[BlockId]
    in_memory: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended.

    Attributes:
        job_id: the caller's number of the job.
        is_load: whether it is a load; otherwise a store.
        keys: blocks that this job has loaded or written.
        is_whole: whether all requested blocks are in their rows (load), or in the slab (store).
        left_out: blocks of a store that storage did not admit.
        seconds: duration from the start, queueing included.
    """

    job_id: int
    is_load: bool
    keys: list[bytes]
    is_whole: bool
    left_out: list[bytes]
    seconds: float


@dataclass(slots=True)
class _Job:
    """A job that has not ended.

    Attributes:
        job_id, is_load, left_out: see ``FinishedJob``.
        asked: its blocks.
        placed: those of them whose rows are lent.
        moving: those of them that it reads or writes.
        began_s: time of its start.
        waiting: ``moving``, from the first that has not ended.
    """

    job_id: int
    is_load: bool
    asked: list[bytes]
    placed: list[bytes]
    moving: list[bytes]
    began_s: float
    waiting: deque[bytes] = field(init=False)
    left_out: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = deque(self.moving)


class BlockSlab(LocalBlockCache):
    """Keyed cache of one storage tier, used through asynchronous jobs.

    A block is in memory only while a job runs, in the row that the job names. So ``reserve`` finds
    no room here, and ``promote`` reads nothing. Blocks in memory can't be evicted from storage: the
    end of a job can't push out its beginning.

    Args:
        tier: the storage.
        rows: the engine's host memory, one block per slot.
        digest: digest of the blocks' namespace, 32 bytes. While it is empty, nothing is found and
            nothing stored.
        most_queued: blocks that may be queued for the disk. More are refused, since each holds a
            row.
        bytes_per_day: see ``LadderOptions``.
        piece_bytes: bytes per read or write.
        lookup_patience_s: see ``LadderOptions``.
        tells_changes: whether ``take_changes`` is called.
        policy: eviction policy; all but LRU need ``on_request`` to be called.
        metrics: by default, metrics that are counted but not exposed.
        clock: seconds.
        on_end: called, on any thread, when a read or write has ended.

    The caller guarantees
        that one thread calls; that the rows of a job do not change until the job is finished; that
        no block is loaded into two rows at a time.
    Errors
        Only ``close`` raises, and a digest of the wrong length: ``ConfigError``. ``FinishedJob``
        reports blocks that can't be stored or loaded.
    """

    def __init__(
        self,
        tier: StorageTier,
        rows: LentMemory,
        digest: bytes,
        *,
        most_queued: int,
        bytes_per_day: int = 0,
        piece_bytes: int = PIECE_BYTES,
        lookup_patience_s: float = 0.0,
        tells_changes: bool = True,
        policy: str = LRU,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.digest = digest  # first: if it is wrong, nothing has been opened
        bytes_per_block = tier.bytes_per_block
        tiers: dict[str, MemoryTier | StorageTier] = {rows.name: rows, tier.name: tier}
        self._tier = tier
        self._rows = rows
        self._mover = LocalMover(tiers, None, clock)
        index = make_key_index(tuple(tiers), lambda: self.digest, (tier.name,), policy)
        super().__init__(
            index,
            tiers,
            self._mover,
            LadderOptions(
                bytes_per_block,
                bytes_per_day={tier.name: bytes_per_day},
                piece_blocks=max(1, piece_bytes // bytes_per_block),
                lookup_patience_s=lookup_patience_s,
            ),
            lambda: self.digest,
            clock,
            metrics=metrics,
            on_change=self._note,
            on_left_out=self._note_left_out,
            on_end=on_end,
        )
        self._most_queued = max(1, most_queued)
        self._num_queued = 0
        self._tells_changes = tells_changes
        self._jobs: list[_Job] = []
        self._leased: set[BlockId] = set()  # leased in storage, since they are in memory, too
        self._holds = Holds(index, tier.name, tier.num_blocks // HELD_SHARE)

    @property
    def digest(self) -> bytes:
        """Digest of the namespace; empty while it is unknown."""
        return self._digest

    @digest.setter
    def digest(self, digest: bytes) -> None:
        if len(digest) not in (0, DIGEST_BYTES):
            raise ConfigError(
                f"digest: a namespace of {len(digest)} bytes can't be stored; give the "
                f"{DIGEST_BYTES} bytes of Namespace.digest, or none while it is not known"
            )
        self._digest = digest

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the slab or in flight to it, without recovered blocks not adopted."""
        return self._index.num_held(self._tier.name)

    @property
    def is_readable(self) -> bool:
        """Whether storage is in use; False while its circuit breaker is open."""
        return self._mover.accepts((self._tier.name, self.memory))

    @property
    def reads_for_s(self) -> float:
        """Seconds that the current read has taken; 0 if there is none."""
        return self._mover.queued_s((self._tier.name, self.memory), lambda num_bytes: 0.0)

    @property
    def num_jobs(self) -> int:
        """Number of jobs that ``take_finished`` has not returned yet."""
        return len(self._jobs)

    # -- look-ups ----------------------------------------------------------------------------------

    def locate(self, key: bytes) -> BlockState:
        """Return the location of a block, as far as the index knows. Changes nothing.

        It is ``STORAGE`` if the block can be loaded, ``ARRIVING`` if it is in flight to the slab.
        """
        if not self.is_readable:
            return BlockState.NOWHERE
        location = super().locate(key)
        if location not in (BlockState.MEMORY, BlockState.ARRIVING):
            return location
        # Some job has it.
        found = self._index.find(key)
        assert found is not None, "a block in memory that the index does not know"
        block, states = found
        if self._storage_of(block, states) is not None:
            return BlockState.STORAGE
        is_moving = State.WRITING in states or self.ladder.are_queued([block])[0]
        return BlockState.ARRIVING if is_moving else BlockState.NOWHERE

    def look(self, keys: Sequence[bytes]) -> LookupResult:
        """Look up which blocks can be loaded, as far as the index knows. Changes nothing."""
        if not self.is_readable:
            return LookupResult.nothing(len(keys))
        blocks, states = self._index.find_all(keys)
        marks = states[1::2]
        if self._lost:
            gone = {block for block, tier in self._lost if tier != self.memory}
            pairs = zip(marks, blocks, strict=True)
            marks = bytes(0 if block in gone else mark for mark, block in pairs)
        return LookupResult(marks, blocks)

    def standing(self, keys: Sequence[bytes]) -> BlockStates:
        """Return the state of ``keys`` in memory, in storage and between them."""
        blocks, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
        in_memory = by_tier[:, 0] == State.READY
        queued = np.array(self.ladder.are_queued(blocks), bool)
        moving = (by_tier == State.WRITING).any(axis=1) | queued
        stored = by_tier[:, 1] == State.READY
        if self._lost:
            for at, block in enumerate(blocks):
                if in_memory[at] or stored[at]:
                    in_memory[at] &= not self._is_doubted(block)
                    stored[at] &= (block, self._tier.name) not in self._lost
        return BlockStates(blocks, in_memory, moving, stored)

    def adopt_recovered(self, keys: Collection[bytes], stops_at_gap: bool = True) -> list[bytes]:
        return super().adopt_recovered(keys, stops_at_gap) if self.is_readable else []

    def lookup(self, keys: Sequence[bytes], has_gaps: bool = False) -> BlockLookup[PendingLookup]:
        if not self.is_readable:
            return BlockLookup([BlockState.NOWHERE] * len(keys), [])
        return super().lookup(keys, has_gaps)

    def hold_until(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """Keep blocks in the slab until ``until_s``, by ``clock``, or until ``let_go``."""
        self._holds.hold(blocks, until_s)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Release held blocks that were read, in the order in which they were held."""
        if keys and (first := self._index.find(keys[0])) is not None:
            self._holds.let_go(first[0], len(keys))

    def _note(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        """Record changes of storage. Changes of rows concern only the jobs."""
        is_stored = tier != self.memory
        if is_stored and self._tells_changes:
            self._record(tier, blocks, is_removed)
        if is_removed:
            return
        self._use(blocks)
        if is_stored:
            states = self._index.states_of(blocks, self.memory)
            placed = zip(blocks, states, strict=True)
            self._lease([block for block, state in placed if state is State.READY])

    # -- rows --------------------------------------------------------------------------------------

    def _place_in_rows(
        self, keys: Sequence[bytes], slots: Sequence[Slot], depths: Sequence[int]
    ) -> None:
        """Note blocks that the engine has in ``slots``, and write those that storage lacks.

        Args:
            keys: in prompt order, none of them in memory already.
            slots: row of each block.
            depths: see ``commit``.
        """
        self._rows.lend(list(slots))
        blocks = self._index.make(keys)
        self._index.begin_write_all(blocks, self.memory, slots)
        self._index.commit_all(blocks, self.memory, self._clock())
        self._index.set_depths(blocks, depths)
        self.ladder.on_admit(self._index.hashes(blocks), blocks)
        self._use(blocks)
        stored = zip(blocks, self._index.states_of(blocks, self._tier.name), strict=True)
        self._lease([block for block, state in stored if state is State.READY])
        self.ladder.enqueue_write(blocks)

    def _fetch_into_rows(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Read blocks from storage into ``slots``. None of them may be in memory already."""
        self._rows.lend(list(slots))
        blocks = tuple(self._known(keys))
        self.ladder.load(Copy(self._tier.name, self.memory, blocks), slots)

    def _free_rows(self, keys: Sequence[bytes]) -> None:
        """Give the rows of blocks back to the engine. No copy from or to them may be in flight.

        Blocks that did not arrive have none.
        """
        there = self.standing(keys)
        blocks = list(compress(there.blocks, there.in_memory))
        leased = [block for block in blocks if block in self._leased]
        self._leased.difference_update(leased)
        self._index.release(leased, self._tier.name)
        slots = [self._index.lose(block, self.memory) for block in blocks]
        assert None not in slots, "a block whose slot is taken back is being copied"
        self._rows.free(cast("list[Slot]", slots))

    def _lease(self, blocks: Sequence[BlockId]) -> None:
        """Keep blocks in storage while they are in memory."""
        self._index.lease(blocks, self._tier.name)
        self._leased.update(blocks)

    # -- jobs --------------------------------------------------------------------------------------

    def store(
        self, job_id: int, keys: Sequence[bytes], depths: Sequence[int], rows: Sequence[Slot]
    ) -> None:
        """Begin a job that writes blocks storage does not have yet. The others count as used.

        Args:
            job_id: the caller's number of the job.
            keys: the blocks.
            depths: position of each block in its prompt, in blocks.
            rows: row of each block.
        """
        at = {key: position for position, key in enumerate(keys)}
        super().adopt_recovered(at, stops_at_gap=False)
        now = self.standing(list(at))
        free = ~(now.moving | now.in_memory)
        mine = list(compress(at, free))
        new = list(compress(at, free & ~now.stored))
        num_new = min(len(new), self._most_queued - self._num_queued) if self.digest else 0
        refused = set(new[num_new:])
        if refused:
            self.ladder.metrics.count(REFUSED_BLOCKS, len(refused), tier=self._tier.name)
        placed = [key for key in mine if key not in refused]
        self._begin(job_id, False, at, placed, new[:num_new])
        self._num_queued += num_new
        self._place_in_rows(
            placed, [rows[at[key]] for key in placed], [depths[at[key]] for key in placed]
        )
        self.touch(at)

    def load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[Slot]) -> None:
        """Begin a job that reads blocks into ``rows``. A missing block does not fail the others."""
        at = {key: position for position, key in enumerate(keys)}
        super().adopt_recovered(at, stops_at_gap=False)
        self.touch(at)
        now = self.standing(list(at))
        there = list(compress(at, now.stored & ~(now.moving | now.in_memory)))
        self._begin(job_id, True, at, there, there)
        self._fetch_into_rows(there, [rows[at[key]] for key in there])

    def _begin(
        self,
        job_id: int,
        is_load: bool,
        asked: Iterable[bytes],
        placed: list[bytes],
        moving: list[bytes],
    ) -> None:
        job = _Job(job_id, is_load, list(asked), placed, moving, self._clock())
        self._jobs.append(job)

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs finished since the last call, and free their rows."""
        self._poll()
        ended = [job for job in self._jobs if not job.waiting]
        self._jobs = [job for job in self._jobs if job.waiting]
        return [self._finish(job) for job in ended]

    def _finish(self, job: _Job) -> FinishedJob:
        now = self.standing(job.asked)
        are_there = now.in_memory if job.is_load else now.stored
        there = set(compress(job.asked, are_there))
        moved, is_whole = [key for key in job.moving if key in there], bool(are_there.all())
        self._free_rows(job.placed)
        if not job.is_load:
            self._num_queued -= len(job.moving)
            self.touch(job.asked)  # its pieces were used one by one, the end of the prompt last
        seconds = self._clock() - job.began_s
        return FinishedJob(job.job_id, job.is_load, moved, is_whole, job.left_out, seconds)

    def _note_left_out(self, tier: str, blocks: Sequence[BlockId]) -> None:
        keys = set(self._index.keys(blocks))
        for job in self._jobs:
            if not job.is_load:
                job.left_out += keys.intersection(job.moving)

    def _poll(self) -> bool:
        """Notice transfers that have ended. Return whether jobs are still waiting for others."""
        self._holds.expire(self._clock())
        self.poll()
        for job in self._jobs:
            while job.waiting:
                some = list(islice(job.waiting, LOOK_BLOCKS))
                still = self.standing(some).moving
                for _ in range(int(still.argmax()) if still.any() else len(some)):
                    job.waiting.popleft()
                if still.any():
                    break
        return any(job.waiting for job in self._jobs)

    def clear(self) -> None:
        """Wait for all jobs, then delete every block, also from storage."""
        self.drain()
        self._holds.clear()
        super().clear()

    def drain(self) -> None:
        """Wait until no read or write is in flight. ``take_finished`` returns the outcomes."""
        while self._poll():
            self.ladder.drain(END_WAIT_S, self._poll)

    def close(self) -> bool:
        """Finish reads and writes, and close the slab, so that another process may open it.

        Stores that are still queued after ``CLOSE_WAIT_S`` are dropped.

        Raises:
            TierError: a read or write does not end. The memory of the jobs must not be freed.
        """
        ends_s = time.monotonic() + CLOSE_WAIT_S
        while self._poll() and (left_s := ends_s - time.monotonic()) > 0:
            self.ladder.drain(left_s, self._poll)
        self._mover.close(0)
        if self._mover.close(END_WAIT_S):
            reason = f"a read or write takes over {END_WAIT_S:.0f} s"
            raise TierError(self._tier.name, "close", reason)
        self.ladder.close()
        self._tier.close()
        return True

    def check_invariants(self, num_private: int = 0) -> None:
        """Raise AssertionError if rows, blocks and leases don't add up."""
        super().check_invariants(num_private)
        num_queued = sum(len(job.moving) for job in self._jobs if not job.is_load)
        assert self._num_queued == num_queued, "queued blocks belong to no job"
