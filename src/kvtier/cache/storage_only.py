"""Cache of blocks in one storage tier, whose memory an engine lends for each job.

No call waits for the storage. The lent blocks are the memory tier of the ladder; see
``blocking_calls.py`` for an engine whose threads wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.cache.block_cache import BlockState, Change
from kvtier.cache.hint_actions import HintActions, PromptCalls
from kvtier.cache.holds import Holds
from kvtier.cache.key_lookup import KeyedLookup
from kvtier.cache.ladder import Ladder, LadderCallbacks, LadderOptions, PendingLookup
from kvtier.cache.local import LocatedBlocks
from kvtier.cache.transfer import LocalMover
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.hints import Hint, HintResult
from kvtier.core.types import HOST, NO_BLOCK, BlockId, Slot
from kvtier.index import State, make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from kvtier.observe.specs import REFUSED_BLOCKS
from kvtier.plan import Copy
from kvtier.tiers import LentMemory, MemoryTier, Pieces, StorageTier

PIECE_BYTES = 16 << 20
"""Bytes per read or write, so that closing does not wait for a long job."""
LOOK_BLOCKS = 64
"""Blocks of a job whose states are queried together."""
DIGEST_BYTES = 32
"""Bytes of a namespace's digest, which storage keeps with each block."""
CLOSE_WAIT_S = 10.0
"""Longest wait for queued stores when the cache is closed; the rest are dropped."""
HELD_SHARE = 2
"""At most 1/HELD_SHARE of the blocks can be held, so that others can be evicted for stores."""
END_WAIT_S = 90.0
"""Longest wait for reads and writes in flight; the disk tier's own deadlines are shorter."""
CODES = bytes(BlockState.STORAGE if state == State.READY else 0 for state in range(256))
"""Codes of a ``BlockState`` by the state of a block in storage, to translate bytes."""


class _States(NamedTuple):
    """State of blocks: bool [n] each.

    blocks: the blocks in the index; ``NO_BLOCK`` if unknown. in_memory: whether each is in lent
    memory. moving: whether it is in flight, or queued for a write. stored: whether storage has it.
    """

    blocks: Sequence[BlockId]
    in_memory: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class StorageJob:
    """Blocks that are read from storage, or written to it.

    Attributes:
        is_load: whether it is a load; otherwise a store.
        asked: the blocks requested.
        placed: those of them whose memory is lent.
        moving: those of them that it reads or writes.
        began_s: time of its start.
        waiting: ``moving``, from the first that has not ended.
        left_out: blocks of a store that storage did not admit.
        is_over: whether it is over, and ``take_finished`` has returned it.
        keys: when it is over, the blocks that it has loaded or written.
        is_whole: when it is over, whether all blocks are in place (load), or in storage (store).
        seconds: when it is over, the time since its start, queueing included.
    """

    is_load: bool
    asked: list[bytes]
    placed: list[bytes]
    moving: list[bytes]
    began_s: float
    waiting: deque[bytes] = field(init=False)
    left_out: list[bytes] = field(default_factory=list)
    is_over: bool = False
    keys: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = deque(self.moving)


class StorageOnlyCache:
    """Cache of blocks in one storage tier, by an engine's keys, used through asynchronous jobs.

    It has no memory of its own: a block is in memory only while a job runs, where the engine has
    lent it. Blocks in memory can't be evicted from storage, so the end of a job can't push out its
    beginning.

    Args:
        tier: the storage.
        sizes: int64 [num_pieces], bytes of each piece of a lent block.
        num_lent: most blocks that all jobs have at a time.
        digest: digest of the blocks' namespace, 32 bytes. While it is empty, nothing is found and
            nothing stored.
        most_queued: blocks that may be queued for the disk. More are refused, since each holds
            memory of the engine.
        bytes_per_day: see ``LadderOptions``.
        piece_bytes: bytes per read or write.
        lookup_patience_s: see ``LadderOptions``.
        tells_changes: whether ``take_changes`` is called.
        policy: eviction policy; all but LRU need ``on_request`` to be called.
        metrics: by default, metrics that are counted but not exposed.
        clock: seconds.
        on_end: called, on any thread, when a read or write has ended.

    Attributes:
        ladder: the lent memory and the storage.
        costs: predicted and actual costs.
        learns: whether a policy learns from requests.

    The caller guarantees
        that one thread calls; that the memory of a job does not change until the job is finished;
        that no block is loaded into two places at a time.
    Errors
        Only ``close`` raises, and a digest of the wrong length: ``ConfigError``. ``StorageJob``
        reports blocks that can't be stored or loaded.
    """

    def __init__(
        self,
        tier: StorageTier,
        sizes: npt.NDArray[np.int64],
        num_lent: int,
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
        self._tier = tier
        self._memory = LentMemory(HOST, sizes, num_lent)
        self._clock = clock
        tiers: dict[str, MemoryTier | StorageTier] = {HOST: self._memory, tier.name: tier}
        self._mover = LocalMover(tiers, None, clock)
        self._index = make_key_index({HOST: LRU, tier.name: policy}, lambda: self.digest)
        self._index.expect(num_lent)
        callbacks = LadderCallbacks(
            self._note, self._note_left_out, on_end, may_write=lambda: bool(self.digest)
        )
        self.ladder = Ladder(
            self._index,
            tiers,
            self._mover,
            LadderOptions(
                tier.bytes_per_block,
                bytes_per_day={tier.name: bytes_per_day},
                piece_blocks=max(1, piece_bytes // tier.bytes_per_block),
                lookup_patience_s=lookup_patience_s,
            ),
            clock=clock,
            metrics=metrics,
            callbacks=callbacks,
        )
        self._lookup = KeyedLookup(self._index, self.ladder, lambda: self.digest, lambda: True)
        self.costs = self.ladder.costs
        self.learns = self._index.learns
        self._lost = self.ladder.lost
        self._most_queued = max(1, most_queued)
        self._num_queued = 0
        self._changes: deque[Change] | None = deque() if tells_changes else None
        self._jobs: list[StorageJob] = []
        self._leased: set[BlockId] = set()  # leased in storage, since they are in memory, too
        self._actions = HintActions[Sequence[bytes]](
            self._index,
            self.ladder,
            PromptCalls(
                retain=lambda _, keys, stated: self._index.retain(keys, stated, clock()),
                blocks=lambda _, keys: self._index.find_all(keys).known,
            ),
            None,
            tier.bytes_per_block,
            self.learns,
            clock,
        )
        self._holds = Holds(self._index, tier.name, tier.num_blocks // HELD_SHARE)

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
        """Number of stored blocks and those in flight, without recovered blocks not adopted."""
        return self._index.num_held(self._tier.name)

    @property
    def is_readable(self) -> bool:
        """Whether storage is in use; False while its circuit breaker is open."""
        return self._mover.accepts((self._tier.name, HOST))

    @property
    def reads_for_s(self) -> float:
        """Seconds that the current read has taken; 0 if there is none."""
        return self._mover.queued_s((self._tier.name, HOST), lambda num_bytes: 0.0)

    @property
    def num_jobs(self) -> int:
        """Number of jobs that ``take_finished`` has not returned yet."""
        return len(self._jobs)

    # -- look-ups ----------------------------------------------------------------------------------

    def locate(self, key: bytes) -> BlockState:
        """Return the location of a block, as far as the index knows. Changes nothing.

        It is ``STORAGE`` if the block can be loaded, ``ARRIVING`` if it is in flight to storage.
        """
        if not self.is_readable:
            return BlockState.NOWHERE
        now = self._states([key])
        if now.stored[0]:
            return BlockState.STORAGE
        return BlockState.ARRIVING if now.moving[0] else BlockState.NOWHERE

    def locate_all(self, keys: Sequence[bytes]) -> LocatedBlocks:
        """Locate blocks, as far as the index knows: in storage, or nowhere. Changes nothing."""
        if not self.is_readable:
            return LocatedBlocks(bytes(len(keys)), [NO_BLOCK] * len(keys), bytes(2 * len(keys)))
        blocks, states = self._index.find_all(keys)
        stored = states[1::2]
        if self._lost:
            pairs = zip(stored, blocks, strict=True)
            stored = bytes(0 if self._is_lost(block) else state for state, block in pairs)
        return LocatedBlocks(stored.translate(CODES), blocks, states)

    def _is_lost(self, block: BlockId) -> bool:
        return (block, self._tier.name) in self._lost

    def _states(self, keys: Sequence[bytes]) -> _States:
        blocks, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, 2)
        queued = np.array(self.ladder.are_queued(blocks), bool)
        moving = (by_tier == State.WRITING).any(axis=1) | queued
        stored = by_tier[:, 1] == State.READY
        if self._lost:
            stored &= [not self._is_lost(block) for block in blocks]
        return _States(blocks, by_tier[:, 0] == State.READY, moving, stored)

    def adopt(self, keys: Collection[bytes], stops_at_gap: bool = True) -> list[bytes]:
        """Adopt blocks that storage recovered from an earlier run. Return their keys.

        See ``LocalBlockCache.adopt``.
        """
        return self._lookup.adopt(keys, stops_at_gap) if self.is_readable else []

    def lookup_storage(self, keys: Sequence[bytes], has_gaps: bool) -> Sequence[PendingLookup]:
        """Begin to look up unknown blocks in storage that does not answer at once.

        Returns the look-ups that are worth waiting for. After an answer, ``poll`` adds its blocks
        to the index.

        Args:
            keys: the blocks of one prompt, in its order.
            has_gaps: whether blocks behind a missing one may be of use.
        """
        if not (self.is_readable and self._lookup.has_to_ask):
            return []
        now = self._states(keys)
        unknown = list(compress(keys, ~(now.stored | now.moving | now.in_memory)))
        return self._lookup.begin(unknown, has_gaps) if unknown else []

    def hold_until(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """Keep blocks in storage until ``until_s``, by ``clock``, or until ``release``."""
        self._holds.hold(blocks, until_s)

    def release(self, keys: Sequence[bytes]) -> None:
        """Release held blocks that were read, in the order in which they were held."""
        if keys and (first := self._index.find(keys[0])) is not None:
            self._holds.release(first[0], len(keys))

    # -- use, from which policies learn ------------------------------------------------------------

    def set_num_last(self, num_blocks: int) -> None:
        """Set how many of the last blocks of a prompt are stored; see ``KeyIndex``."""
        self._index.set_num_last(num_blocks)

    def on_request(self, keys: Iterable[bytes]) -> None:
        """Report a new request, once. keys: all blocks of its prompt, in its order."""
        self._index.on_request(keys, self._clock())

    def continues(self, keys: Iterable[bytes], last_key: bytes) -> None:
        """Report that an answer's blocks follow the block ``last_key``."""
        self._index.continues(keys, last_key)

    def hint(self, keys: Sequence[bytes], hint: Hint, block_size: int) -> Sequence[HintResult]:
        """Apply a hint to a prompt's blocks, from now on. Return the result of each action.

        Prefetches are declined, since there is no memory to read to. A demotion lets the blocks be
        evicted first. block_size: tokens per block.
        """
        statements = hint.block_hint(block_size, self._clock())
        return [self._actions.apply(b"", keys, stated) for stated in statements]

    def touch(self, keys: Collection[bytes]) -> None:
        """Note a use of blocks, in prompt order. The first ones are evicted last."""
        self._index.touch(self._index.find_all(keys).known, self._clock())

    # -- jobs --------------------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], depths: Sequence[int], memory: Pieces) -> StorageJob:
        """Begin a job that writes blocks storage does not have yet. The others count as used.

        Args:
            keys: the blocks, in prompt order.
            depths: position of each block in its prompt, in blocks.
            memory: where each block is.
        """
        at = {key: position for position, key in enumerate(keys)}
        self._lookup.adopt(at, stops_at_gap=False)
        now = self._states(list(at))
        free = ~(now.moving | now.in_memory)
        new = list(compress(at, free & ~now.stored))
        takes_writes = self._tier.facts.takes_writes
        may_write = self.digest and takes_writes
        num_new = min(len(new), self._most_queued - self._num_queued) if may_write else 0
        refused = set(new[num_new:])
        if refused and takes_writes:
            self.ladder.metrics.count(REFUSED_BLOCKS, len(refused), tier=self._tier.name)
        placed = [key for key in compress(at, free) if key not in refused]
        job = self._begin(False, at, placed, new[:num_new])
        self._num_queued += num_new
        where = [at[key] for key in placed]
        self._place(placed, memory.pick(where), [depths[position] for position in where])
        self.touch(at)
        return job

    def _place(self, keys: Sequence[bytes], memory: Pieces, depths: Sequence[int]) -> None:
        """Note blocks that the engine has in memory, and write the ones that storage lacks."""
        now = self._clock()
        blocks, hashes = self._index.write_new(keys, HOST, self._memory.lend(memory), now)
        self._index.commit_prompt(blocks, depths, HOST, now)
        self.ladder.on_admit(hashes, blocks)
        self._index.touch(blocks, now)
        stored = zip(blocks, self._index.states_of(blocks, self._tier.name), strict=True)
        self._lease([block for block, state in stored if state is State.READY])
        self.ladder.enqueue_write(blocks)

    def load(self, keys: Sequence[bytes], memory: Pieces) -> StorageJob:
        """Begin a job that reads blocks to ``memory``. A missing one does not fail the others."""
        at = {key: position for position, key in enumerate(keys)}
        self._lookup.adopt(at, stops_at_gap=False)
        self.touch(at)
        now = self._states(list(at))
        are_there = now.stored & ~(now.moving | now.in_memory)
        there = list(compress(at, are_there))
        job = self._begin(True, at, there, there)
        slots = self._memory.lend(memory.pick([at[key] for key in there]))
        blocks = tuple(compress(now.blocks, are_there))
        self.ladder.load(Copy(self._tier.name, HOST, blocks), slots)
        return job

    def _begin(
        self, is_load: bool, asked: Iterable[bytes], placed: list[bytes], moving: list[bytes]
    ) -> StorageJob:
        job = StorageJob(is_load, list(asked), placed, moving, self._clock())
        self._jobs.append(job)
        return job

    def take_finished(self) -> list[StorageJob]:
        """Return the jobs that are over since the last call. Their memory is not used any more."""
        self.poll()
        ended = [job for job in self._jobs if not job.waiting]
        self._jobs = [job for job in self._jobs if job.waiting]
        for job in ended:
            self._finish(job)
        return ended

    def _finish(self, job: StorageJob) -> None:
        now = self._states(job.asked)
        are_there = now.in_memory if job.is_load else now.stored
        there = set(compress(job.asked, are_there))
        job.keys, job.is_whole = [key for key in job.moving if key in there], bool(are_there.all())
        self._free(job.placed)
        if not job.is_load:
            self._num_queued -= len(job.moving)
            self.touch(job.asked)  # its pieces were used one by one, the end of the prompt last
        job.seconds, job.is_over = self._clock() - job.began_s, True

    def _free(self, keys: Sequence[bytes]) -> None:
        """Give the memory of blocks back to the engine. No copy from or to it may be in flight.

        Blocks that did not arrive have none.
        """
        now = self._states(keys)
        blocks = list(compress(now.blocks, now.in_memory))
        leased = [block for block in blocks if block in self._leased]
        self._leased.difference_update(leased)
        self._index.release(leased, self._tier.name)
        slots = [self._index.lose(block, HOST) for block in blocks]
        assert None not in slots, "a block whose memory is taken back is being copied"
        self._memory.free(cast("list[Slot]", slots))

    def _lease(self, blocks: Sequence[BlockId]) -> None:
        """Keep blocks in storage while they are in memory."""
        self._index.lease(blocks, self._tier.name)
        self._leased.update(blocks)

    def _note(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        """Record changes of storage. Changes of memory concern only the jobs."""
        is_stored = tier != HOST
        if is_stored and blocks and self._changes is not None:
            self._changes.append(Change(self._index.keys(blocks), tier, is_removed))
        if is_removed:
            return
        self._index.touch(blocks, self._clock())
        if is_stored:
            placed = zip(blocks, self._index.states_of(blocks, HOST), strict=True)
            self._lease([block for block, state in placed if state is State.READY])

    def _note_left_out(self, tier: str, blocks: Sequence[BlockId]) -> None:
        keys = set(self._index.keys(blocks))
        for job in self._jobs:
            if not job.is_load:
                job.left_out += keys.intersection(job.moving)

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Notice what has ended. Return whether jobs still wait for transfers."""
        self._holds.expire(self._clock())
        self.ladder.poll()
        for job in self._jobs:
            while job.waiting:
                some = list(islice(job.waiting, LOOK_BLOCKS))
                still = self._states(some).moving
                for _ in range(int(still.argmax()) if still.any() else len(some)):
                    job.waiting.popleft()
                if still.any():
                    break
        return any(job.waiting for job in self._jobs)

    def take_changes(self) -> list[Change]:
        """Return the blocks that entered or left storage since the last call, to any thread."""
        changes = self._changes or deque()
        return [changes.popleft() for _ in range(len(changes))]

    def clear(self) -> None:
        """Wait for all jobs, then delete every block, also from storage."""
        self.drain()
        self._holds.clear()
        self.ladder.clear()

    def drain(self) -> None:
        """Wait until no read or write is in flight. ``take_finished`` returns the outcomes."""
        while self.poll():
            self.ladder.drain(END_WAIT_S, self.poll)

    def close(self) -> None:
        """Finish reads and writes, and close the storage, so that another process may open it.

        Stores that are still queued after ``CLOSE_WAIT_S`` are dropped.

        Raises:
            TierError: a read or write does not end. The memory of the jobs must not be freed.
        """
        ends_s = time.monotonic() + CLOSE_WAIT_S
        while self.poll() and (left_s := ends_s - time.monotonic()) > 0:
            self.ladder.drain(left_s, self.poll)
        self._mover.close(0)
        if self._mover.close(END_WAIT_S):
            reason = f"a read or write takes over {END_WAIT_S:.0f} s"
            raise TierError(self._tier.name, "close", reason)
        self.ladder.close()
        self._tier.close()

    def check_invariants(self) -> None:
        """Raise AssertionError if memory, blocks and leases don't add up."""
        self.ladder.check_invariants(0)
        num_queued = sum(len(job.moving) for job in self._jobs if not job.is_load)
        assert self._num_queued == num_queued, "queued blocks belong to no job"
