"""Blocks in a slab, by the engine's own keys, as jobs over the rows of its host memory.

Whoever asks never waits. What is there, what leaves and what is on its way is the ladder's
business: the engine's host memory is its memory tier, for as long as a job lasts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

from kvtier.assembly import build_ladder
from kvtier.connectors.common.holds import Holds
from kvtier.connectors.common.row_cache import Look, RowCache
from kvtier.errors import ConfigError, TierError
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.keyed.cache import BlockLocation, Change
from kvtier.ladder import CostMetrics, LadderOptions, PendingLookup
from kvtier.plan import CostModel, Costs
from kvtier.telemetry import Metrics
from kvtier.tiers import LentMemory, MemoryTier, StorageTier
from kvtier.transfer import LocalMover
from kvtier.types import BlockId, Slot

PIECE_BYTES = 16 << 20
"""Read or written at a time, so that whoever closes does not wait for a long job."""
LOOK_BLOCKS = 64
"""Of a job, looked at together."""
DIGEST_BYTES = 32
"""Of a namespace, as storage keeps it beside each block."""
CLOSE_WAIT_S = 10.0
"""For stores that are queued when the slab is closed; the rest are dropped."""
HELD_SHARE = 2
"""At most one block in so many can be held: the others make room for what is stored."""
END_WAIT_S = 90.0
"""For reads and writes under way; the disk tier's own deadlines come first."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended.

    keys: of a load that are in place, or of a store that were written for it.

    is_whole: all that was asked for is in place, or in the slab. left_out: of a store, that were
    not written, for they are not worth their room. seconds: from the start, time in line included.
    """

    job_id: int
    is_load: bool
    keys: list[bytes]
    is_whole: bool
    left_out: list[bytes]
    seconds: float


@dataclass(slots=True)
class _Job:
    """A job.

    asked: its blocks. placed: those of them whose rows are lent. moving: those that are on their
    way, or wait for it. waiting: ``moving``, from the first that has not ended. left_out: those
    that are not worth their room.
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


class BlockSlab:
    """A storage tier as a cache of jobs.

    The block that was used least recently leaves first, or the one that another policy chooses, by
    the requests that it was told of.

    rows: the engine's host memory, in slots of a block each. digest: of the namespace that the
    blocks belong to, 32 bytes; while it is empty nobody knows what they are called: none is found,
    and none is stored. most_queued: blocks that may wait for the disk; more are refused, since each
    of them holds a row. bytes_per_day, lookup_patience_s: see ``LadderOptions``. tells_changes:
    whether ``take_changes`` is called. policy: all but LRU want ``asked`` to be called. metrics:
    what is counted; nothing shows it where there are none. clock: seconds.

    The caller guarantees
        one thread calls; the rows of a job stay as they are until the job is finished; no block is
        loaded into two rows at a time.
    Outcomes and errors
        nothing raises but ``close``, and a digest of the wrong length: ``ConfigError``. What can't
        be stored or loaded is told by ``FinishedJob``.
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
    ) -> None:
        self.digest = digest  # first: where it is wrong nothing was begun
        bytes_per_block = tier.bytes_per_block
        tiers: dict[str, MemoryTier | StorageTier] = {rows.name: rows, tier.name: tier}
        self._tier = tier
        self._memory = rows.name
        self._clock = clock
        self._mover = LocalMover(tiers, None, clock)
        self._index = make_key_index(tuple(tiers), lambda: self.digest, (tier.name,), policy)
        self._ladder = build_ladder(
            self._index,
            tiers,
            self._mover,
            LadderOptions(
                bytes_per_block,
                bytes_per_day={tier.name: bytes_per_day},
                piece_blocks=max(1, piece_bytes // bytes_per_block),
                lookup_patience_s=lookup_patience_s,
            ),
            clock=clock,
            metrics=metrics,
        )
        self._cache = RowCache(rows, self._index, self._ladder, lambda: self.digest, clock)
        self._most_queued = max(1, most_queued)
        self._num_queued = 0
        self._tells_changes = tells_changes
        self._changes: list[Change] = []
        self._jobs: list[_Job] = []
        self._ladder.eviction.tell_left_out = self._note_left_out
        self._holds = Holds(self._index, tier.name, tier.num_blocks // HELD_SHARE)

    @property
    def digest(self) -> bytes:
        """Return the digest of the namespace; empty while it is unknown."""
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
        """Return the number of blocks in the slab or on their way to it.

        Recovered blocks that nobody has asked for are not counted.
        """
        return self._index.num_held(self._tier.name)

    @property
    def is_readable(self) -> bool:
        """False while storage is left alone, for it failed again and again."""
        return self._mover.accepts((self._tier.name, self._memory))

    @property
    def reads_for_s(self) -> float:
        """Return how long the current read has taken; 0 for none."""
        return self._mover.queued_s((self._tier.name, self._memory), lambda num_bytes: 0.0)

    @property
    def num_jobs(self) -> int:
        """Jobs that ``take_finished`` has not returned yet."""
        return len(self._jobs)

    # -- what is there -----------------------------------------------------------------------------

    def locate(self, key: bytes) -> BlockLocation:
        """Return the location of a block, as far as the index knows. Changes nothing.

        ``STORAGE`` where it can be loaded, ``ARRIVING`` where it is on its way to the slab.
        """
        if not self.is_readable:
            return BlockLocation.NOWHERE
        place = self._cache.locate(key)
        if place not in (BlockLocation.MEMORY, BlockLocation.ARRIVING):
            return place
        # Some job has it.
        if self._cache.is_stored(key):
            return BlockLocation.STORAGE
        return BlockLocation.ARRIVING if self._cache.is_moving(key) else BlockLocation.NOWHERE

    def look(self, keys: Sequence[bytes]) -> Look:
        """Return which blocks can be loaded, as far as the index knows. Changes nothing."""
        if not self.is_readable:
            return Look.nothing(len(keys))
        return self._cache.look(keys)

    def adopt_recovered(self, keys: Sequence[bytes], stops_at_gap: bool = True) -> list[bytes]:
        """Adopt blocks that a restart found; see ``KeyedCache.adopt_recovered``."""
        return self._cache.adopt_recovered(keys, stops_at_gap) if self.is_readable else []

    def begin_lookup(self, keys: Sequence[bytes], has_gaps: bool = False) -> list[PendingLookup]:
        """Ask storage that takes its time which of ``keys`` it has.

        Returns the look-ups that are worth waiting for, until ``hear`` takes the answers in. See
        ``KeyedCache.begin_lookup``.
        """
        return self._cache.begin_lookup(keys, has_gaps)[1] if self.is_readable else []

    def hear(self) -> None:
        """Take in the answers of storage, so that its blocks can be found."""
        self._ladder.storage_lookup.hear()

    def hold(self, blocks: Sequence[BlockId], until_s: float) -> None:
        """They are in the slab, and stay until ``until_s``, by ``clock``, or until ``let_go``."""
        self._holds.hold(blocks, until_s)

    @property
    def learns(self) -> bool:
        """Whether a policy wants to hear of requests."""
        return self._cache.learns

    def asked(self, keys: Iterable[bytes]) -> None:
        """A request begins; see ``KeyedCache.asked``."""
        self._cache.asked(keys)

    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        """Blocks that no request has asked for, perhaps, come behind ``before``.

        See ``KeyIndex.continues``.
        """
        self._cache.continues(keys, before)

    def touch(self, keys: Collection[bytes]) -> None:
        """They were used just now. The first ones, the beginning of a prompt, leave last."""
        self._cache.touch(keys)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """One who was told of them has read them, in the order in which they were held."""
        if first := self._cache.known(keys[:1]):
            self._holds.let_go(first[0], len(keys))

    def take_changes(self) -> list[Change]:
        """Return the blocks that entered and left the slab since the last call, in order."""
        self._note_changes()
        changes, self._changes = self._changes, []
        return changes

    def _note_changes(self) -> None:
        """Collect the changes of the index.

        Called often enough that nothing piles up if nobody reads them.
        """
        changes = self._cache.take_changes()
        if self._tells_changes:
            self._changes += [each for each in changes if each.tier == self._tier.name]

    # -- jobs --------------------------------------------------------------------------------------

    def store(
        self, job_id: int, keys: Sequence[bytes], depths: Sequence[int], rows: Sequence[Slot]
    ) -> None:
        """Write blocks that are not there yet; the others count as used.

        depths: of each block, its position in the prompt, in blocks. rows: where it is.
        """
        at = {key: position for position, key in enumerate(keys)}
        self._cache.adopt_recovered(at, stops_at_gap=False)
        now = self._cache.standing(list(at))
        free = ~(now.moving | now.in_memory)
        mine = list(compress(at, free))
        new = list(compress(at, free & ~now.stored))
        num_new = min(len(new), self._most_queued - self._num_queued) if self.digest else 0
        refused = set(new[num_new:])
        if refused:
            self._ladder.metrics.count(
                "kvtier_refused_blocks_total", len(refused), tier=self._tier.name
            )
        placed = [key for key in mine if key not in refused]
        self._begin(job_id, False, at, placed, new[:num_new])
        self._num_queued += num_new
        self._cache.place(
            placed, [rows[at[key]] for key in placed], [depths[at[key]] for key in placed]
        )
        self.touch(at)

    def load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[Slot]) -> None:
        """Read blocks into ``rows``. Those that are not there fail, and no others with them."""
        at = {key: position for position, key in enumerate(keys)}
        self._cache.adopt_recovered(at, stops_at_gap=False)
        self.touch(at)
        now = self._cache.standing(list(at))
        there = list(compress(at, now.stored & ~(now.moving | now.in_memory)))
        self._begin(job_id, True, at, there, there)
        self._cache.fetch(there, [rows[at[key]] for key in there])

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
        """Jobs that were finished since the last call. Their blocks can be found, or not, now."""
        self._poll()
        self._note_changes()
        ended = [job for job in self._jobs if not job.waiting]
        self._jobs = [job for job in self._jobs if job.waiting]
        return [self._finish(job) for job in ended]

    def _finish(self, job: _Job) -> FinishedJob:
        now = self._cache.standing(job.asked)
        are_there = now.in_memory if job.is_load else now.stored
        there = set(compress(job.asked, are_there))
        moved, is_whole = [key for key in job.moving if key in there], bool(are_there.all())
        self._cache.displace(job.placed)
        if not job.is_load:
            self._num_queued -= len(job.moving)
            self.touch(job.asked)  # its pieces came one by one, the end of the prompt last
        seconds = self._clock() - job.began_s
        return FinishedJob(job.job_id, job.is_load, moved, is_whole, job.left_out, seconds)

    def _note_left_out(self, tier: str, blocks: Sequence[BlockId]) -> None:
        keys = set(self._index.keys(blocks))
        for job in self._jobs:
            if not job.is_load:
                job.left_out += keys.intersection(job.moving)

    def _poll(self) -> bool:
        """Notice what has ended. True while something waits or moves."""
        self._holds.expire(self._clock())
        self._cache.poll()
        for job in self._jobs:
            while job.waiting:
                some = list(islice(job.waiting, LOOK_BLOCKS))
                still = self._cache.standing(some).moving
                for _ in range(int(still.argmax()) if still.any() else len(some)):
                    job.waiting.popleft()
                if still.any():
                    break
        return any(job.waiting for job in self._jobs)

    @property
    def costs(self) -> CostModel:
        """Return the measured costs of reads and prefill."""
        return self._ladder.costs

    @property
    def account(self) -> CostMetrics:
        """Return the cost metrics, which are told of prefill, decisions and savings."""
        return self._ladder.account

    def cost_snapshot(self) -> Costs:
        """Return the current costs of reads and prefill, queued work included."""
        return self._ladder.cost_snapshot()

    def tell_of_ends(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when ``take_finished`` may have something, on a thread that moves blocks.

        For owners that sleep meanwhile.
        """
        self._ladder.transfers.tell_of_ends(tell)

    def clear(self) -> None:
        """Forget every block, in storage as well and for good, when the jobs have ended."""
        self.drain()
        self._holds.clear()
        self._cache.clear()

    def drain(self) -> None:
        """Wait until nothing is read or written any more. ``take_finished`` tells what became."""
        while self._poll():
            self._ladder.transfers.wait(END_WAIT_S)

    def close(self) -> None:
        """Finish what is under way, and give the slab to its next owner.

        Stores that are still queued after ``CLOSE_WAIT_S`` are dropped. ``TierError`` where a read
        or a write does not end: the memory of the jobs must stay then.
        """
        ends_s = time.monotonic() + CLOSE_WAIT_S
        while self._poll() and (left_s := ends_s - time.monotonic()) > 0:
            self._ladder.transfers.wait(left_s)
        self._mover.close(0)
        if self._mover.close(END_WAIT_S):
            reason = f"a read or write takes over {END_WAIT_S:.0f} s"
            raise TierError(self._tier.name, "close", reason)
        self._ladder.close()
        self._tier.close()

    def check_invariants(self) -> None:
        """Raise AssertionError where rows, blocks and leases don't add up."""
        self._cache.check_invariants()
        num_queued = sum(len(job.moving) for job in self._jobs if not job.is_load)
        assert self._num_queued == num_queued, "blocks wait for nobody"
