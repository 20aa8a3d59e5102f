"""Blocking calls of an engine's threads to a storage tier."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from threading import Condition, Lock

import numpy as np
import numpy.typing as npt

from kvtier.cache.block_cache import BlockState, Change
from kvtier.cache.local import LocatedBlocks
from kvtier.cache.storage_only import StorageJob, StorageOnlyCache
from kvtier.connectors.common.names import block_key
from kvtier.core.errors import TierError
from kvtier.core.hints import Hint
from kvtier.core.types import NO_BLOCK
from kvtier.index.policies.replayed import LRU
from kvtier.index.selection import select
from kvtier.observe import Metrics
from kvtier.plan import Costs
from kvtier.plan.decide import FoundBlocks, LoadUpTo, Waited, decide
from kvtier.tiers import Outcome, Pieces, StorageTier
from kvtier.tiers.memory import pages

CALL_BLOCKS = 256
"""Most blocks of one job; a longer call has several jobs, one after the other."""
NUM_CALLS = 8
"""Most calls that move blocks at a time."""
NUM_LENT = 4 * CALL_BLOCKS * NUM_CALLS
"""Most lent blocks: four times those of all calls, since a quarter may be in flight to storage."""
PIECE_BYTES = 128 << 20
"""Bytes per read or write. They are large, since the caller waits for all of them."""
MAX_PREFILLS = 256
LOOK_S = 1.0
"""Longest pause between two checks of a waiting caller."""
ANSWER_S = 0.5
"""Longest wait of a look-up for a store's answer. A store that took longer is not waited for until
it answers in time again."""
GLANCE_S = 0.002
"""Longest time for which calls reuse the state that an earlier call has polled."""
FIND_S = 1.0
READ_S = 10.0
"""Timeouts of calls to a slab of another process; a block that takes longer counts as absent."""
STORAGE = BlockState.STORAGE
_ABANDONED: list[mmap.mmap] = []


class SpareMemory:
    """Memory for blocks that are read only to measure the duration of a read.

    sizes: int64 [num_pieces], bytes of each piece of a block.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], num_blocks: int) -> None:
        num_bytes = int(sizes.sum())
        self._pages = pages.anonymous(num_blocks * num_bytes)
        first = np.frombuffer(self._pages, np.uint8).ctypes.data
        begins = first + num_bytes * np.arange(num_blocks)
        self.blocks = Pieces.whole(begins, num_bytes).cut(sizes)

    def close(self) -> None:
        """Free the memory, when no read into it is in flight."""
        self._pages.close()

    def abandon(self) -> None:
        """Keep the memory for the life of the process, since a read into it does not end."""
        _ABANDONED.append(self._pages)


class BlockingCalls:
    """Blocking calls to a ``StorageOnlyCache``, by the engine's keys of 32 bytes.

    Args:
        tier: the storage.
        sizes: int64 [num_pieces], bytes of each piece of a block.
        digest: return the digest of the namespace; b"" while it is unknown. Nothing is found or
            stored in that case.
        hold_s: seconds for which a block that was found is kept from eviction.
        late_s: while a read takes longer, nothing is found.
        block_tokens: tokens per block, for the planner that leaves out blocks which are faster to
            compute than to read; 0 for no planner.
        always_loads: whether all blocks are loaded, at any cost.
        policy, bytes_per_day, metrics, tells_changes: see ``StorageOnlyCache``.
        clock: seconds.

    The caller guarantees
        that the memory of a call's blocks is alive and not accessed otherwise until the call
        returns.
    Errors
        Only ``close`` raises. Blocks that can't be stored or loaded count as absent. A call returns
        when none of its copies is in flight any more.
    """

    def __init__(
        self,
        tier: StorageTier,
        sizes: Sequence[int],
        digest: Callable[[], bytes],
        *,
        hold_s: float = 60.0,
        late_s: float = 5.0,
        block_tokens: int = 0,
        always_loads: bool = False,
        policy: str = LRU,
        bytes_per_day: int = 0,
        metrics: Metrics | None = None,
        tells_changes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._digest = digest
        self._tier_name = tier.name
        self._bytes_per_block = tier.bytes_per_block
        self._hold_s = hold_s
        self._late_s = late_s
        self._clock = clock
        self._block_tokens = block_tokens
        self._always_loads = always_loads
        self._prefills: deque[tuple[int, int, float]] = deque(maxlen=MAX_PREFILLS)
        self.num_recomputed = 0
        """Blocks that were found but not reported, since computing them is faster."""
        self._sizes = np.array(sizes, np.int64)
        self._finds_at_once = tier.facts.finds_at_once
        self.cache = StorageOnlyCache(
            tier,
            self._sizes,
            NUM_LENT,
            b"",
            most_queued=NUM_LENT,
            bytes_per_day=bytes_per_day,
            piece_bytes=PIECE_BYTES,
            lookup_patience_s=ANSWER_S,
            tells_changes=tells_changes,
            policy=policy,
            metrics=metrics,
            clock=clock,
            on_end=self._ring,
        )
        self._lock = Lock()  # around the cache, which belongs to one thread at a time
        self._bell = Condition(Lock())
        self._num_rings = 0
        self._probes: dict[StorageJob, SpareMemory] = {}
        self._tended_s, self._num_heard = -inf, 0
        self._snapshot: Costs | None = None

    @property
    def learns(self) -> bool:
        """Whether a policy learns from requests."""
        return self.cache.learns

    def set_num_last(self, num_blocks: int) -> None:
        """Set how many of the last blocks of a prompt are stored, if not all."""
        with self._lock:
            self.cache.set_num_last(num_blocks)

    def on_request(self, keys: Sequence[bytes]) -> None:
        """Report a new request to policies that learn. Call it once per request.

        keys: its whole prompt, from the first block on.
        """
        with self._lock:
            self.cache.on_request(keys)

    def hint(self, keys: Sequence[bytes], hint: Hint) -> None:
        """Apply a client's hint to the blocks of a prompt that was reported."""
        with self._lock:
            self.cache.hint(keys, hint, self._block_tokens)

    def take_changes(self) -> list[Change]:
        """Return the blocks that entered or left storage since the last call. Never waits."""
        return self.cache.take_changes()

    def num_found(self, keys: Sequence[bytes], num_before: int = 0) -> int:
        """Return how many of the first of ``keys`` are found.

        They are kept for ``hold_s``, or until they are loaded; a load counts as a use.

        num_before: number of the prompt's blocks before ``keys``.
        """
        self._ask(keys)
        with self._lock:
            found = self._look(keys)
            num = len(found.codes) - len(found.codes.lstrip(bytes([STORAGE])))
            if num and self._block_tokens:
                num = self._worth(num_before, num, keys)
            self.cache.hold_until(found.blocks[:num], self._clock() + self._hold_s)
            return num

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each of ``keys`` whether it is found. They are kept as by ``num_found``."""
        self._ask(keys, has_gaps=True)
        with self._lock:
            found = self._look(keys)
            there = select(found.blocks, found.positions(STORAGE))
            self.cache.hold_until(there, self._clock() + self._hold_s)
            return _are_stored(found)

    def _ask(self, keys: Sequence[bytes], has_gaps: bool = False) -> None:
        """Look up keys in storage that does not answer at once, and wait without the lock."""
        ends_s = time.monotonic() + ANSWER_S
        while not self._finds_at_once:
            with self._lock:
                self._glance()
                lookups = self.cache.lookup_storage(keys, has_gaps)
            for lookup in lookups:
                lookup.job.wait(max(0.0, ends_s - time.monotonic()))
            if not lookups or time.monotonic() >= ends_s:
                return
            with self._lock:
                self._collect()

    def _look(self, keys: Sequence[bytes]) -> LocatedBlocks:
        self._glance()
        if self.cache.reads_for_s > self._late_s:
            return LocatedBlocks(bytes(len(keys)), [NO_BLOCK] * len(keys), bytes(2 * len(keys)))
        return self._adopt_and_look(keys)

    def _adopt_and_look(self, keys: Sequence[bytes]) -> LocatedBlocks:
        """Look up keys. Recovered blocks are adopted, and count as used."""
        found = self.cache.locate_all(keys)
        if NO_BLOCK in found.blocks and (adopted := self.cache.adopt(keys)):
            self.cache.touch(adopted)
            found = self.cache.locate_all(keys)
        return found

    def _worth(self, num_before: int, num_found: int, keys: Sequence[bytes]) -> int:
        """Return how many of the found blocks to report: all, or none if computing is faster."""
        first, end = (num * self._block_tokens for num in (num_before, num_before + num_found))
        found = FoundBlocks(
            first,
            num_tokens=end,
            ready=[end],
            reachable=[end],
            sources=lambda end: [self._tier_name] * num_found,
            # The cost of reading is linear, that of computing the rest concave: the sum has its
            # minimum at an end, so reading a part is never best.
            block_size=0,
            bytes_per_block=self._bytes_per_block,
        )
        now_s, alone = self._clock(), Waited(may_wait=False)
        decision = decide(found, alone, self._costs, now_s, always_loads=self._always_loads)
        if isinstance(decision, LoadUpTo):
            self.cache.costs.planned(num_found, 0)
            return num_found
        self.cache.costs.planned(0, num_found)
        self.num_recomputed += num_found
        if not self._probes:
            self._probe(keys[: self.cache.ladder.num_to_probe(self._tier_name, num_found)])
        return 0

    def _probe(self, keys: Sequence[bytes]) -> None:
        """Read blocks that no call waits for, to measure the current duration of a read."""
        if not keys:
            return
        spare = SpareMemory(self._sizes, len(keys))
        self._probes[self.cache.load(keys, spare.blocks)] = spare

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Report that ``num_tokens`` after ``num_before`` others were computed in ``seconds``.

        Any thread may call it. Never waits.
        """
        self._prefills.append((num_before, num_tokens, seconds))

    def load(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        """Read blocks. Return for each whether it is in place.

        The memory of the others has undefined content.

        Args:
            keys: in prompt order.
            blocks: destinations.
            before: keys of the prompt's blocks before ``keys``, which count as used as well.
        """
        done: list[bool] = []
        began_s = self._clock()
        for at in range(0, len(keys), CALL_BLOCKS):
            some = slice(at, at + CALL_BLOCKS)
            done += self._load(keys[some], blocks.pick(some), [*before, *keys[:at]])
        num = done.index(False) if False in done else len(done)
        first, end = (self._block_tokens * each for each in (len(before), len(before) + num))
        with self._lock:
            self.cache.costs.hit(self._tier_name, sum(done))
            self.cache.costs.saved(first, end, self._clock() - began_s)
        return done

    def _load(self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._tend()
            job = self.cache.load(keys, blocks)
        self._wait(job)
        arrived = set(job.keys)
        with self._lock:
            self.cache.release(keys)
            self.cache.touch([*before, *keys])
        place = {key: at for at, key in enumerate(keys)}  # a repeated key's last position
        return [key in arrived and place[key] == at for at, key in enumerate(keys)]

    def store(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        """Write blocks that storage does not have yet.

        After a failure, later blocks are not written: they are of no use without the earlier ones.

        Args:
            keys: in prompt order.
            blocks: their memory.
            before: keys of the prompt's blocks before ``keys``.

        Returns:
            For each block, whether storage has it now, or did not admit it.
        """
        done: list[bool] = []
        for at in range(0, len(keys), CALL_BLOCKS):
            if not all(done):
                return done + [False] * (len(keys) - len(done))
            some = slice(at, at + CALL_BLOCKS)
            done += self._store(keys[some], blocks.pick(some), [*before, *keys[:at]])
        return done

    def _store(self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes]) -> list[bool]:
        prompt = [*before, *keys]
        with self._lock:
            self._tend()
            self.cache.touch(prompt)  # so that its own beginning is not evicted for it
            if self.cache.learns and before:
                self.cache.continues(keys, before[-1])
            are_there = _are_stored(self._adopt_and_look(keys))
            new = [at for at, is_there in enumerate(are_there) if not is_there]
            depths = [len(before) + at for at in new]
            job = self.cache.store([keys[at] for at in new], depths, blocks.pick(new))
        self._wait(job)
        with self._lock:
            self.cache.touch(prompt)
            are_there = _are_stored(self.cache.locate_all(keys))
        left_out, pairs = set(job.left_out), zip(keys, are_there, strict=True)
        return [is_there or key in left_out for key, is_there in pairs]

    def clear(self) -> None:
        """Delete all blocks."""
        with self._lock:
            self.cache.clear()

    def close(self) -> None:
        """Finish reads and writes, and close the storage; see ``StorageOnlyCache.close``."""
        with self._lock:
            try:
                self.cache.close()
            except TierError:
                for spare in self._probes.values():
                    spare.abandon()
                raise
            self._collect()

    # -- waiting -----------------------------------------------------------------------------------

    def _glance(self) -> None:
        """Call ``_tend``, unless that was done a moment ago: a look-up makes several calls."""
        has_news = self._prefills or self._num_rings != self._num_heard
        if has_news or self._clock() - self._tended_s >= GLANCE_S:
            self._tend()

    def _tend(self) -> None:
        """Process prefill reports, the namespace's digest, and finished jobs."""
        self._tended_s, self._num_heard, self._snapshot = self._clock(), self._num_rings, None
        while self._prefills:
            self.cache.costs.observe_prefill(*self._prefills.popleft())
        self.cache.digest = self._digest()
        self._collect()

    def _costs(self) -> Costs:
        """Return the costs of reading and computing, as of the last ``_tend``."""
        if self._snapshot is None:
            self._snapshot = self.cache.ladder.cost_snapshot()
        return self._snapshot

    def _collect(self) -> None:
        finished = self.cache.take_finished()
        for job in finished:
            if spare := self._probes.pop(job, None):
                spare.close()
        if finished:
            self._ring()

    def _wait(self, job: StorageJob) -> None:
        """Wait until the job is over. Each waiting thread collects other threads' jobs, too."""
        while True:
            num_rings = self._num_rings
            with self._lock:
                self._collect()
                if job.is_over:
                    return
            with self._bell:
                self._bell.wait_for(partial(self._has_rung, num_rings), LOOK_S)

    def _has_rung(self, num_rings: int) -> bool:
        return self._num_rings != num_rings

    def _ring(self) -> None:
        """Wake the waiting callers. Must not wait for the cache, whose own threads call this."""
        with self._bell:
            self._num_rings += 1
            self._bell.notify_all()


class SlabReads:
    """Reads of a slab that another process owns.

    Nothing is stored, held or counted as used: the owner gets the same calls and does that.
    """

    def __init__(self, tier: StorageTier, digest: Callable[[], bytes]) -> None:
        self._tier = tier
        self._digest = digest

    learns = False
    """Only the slab's owner reports requests to its policy."""

    def set_num_last(self, num_blocks: int) -> None:
        """Do nothing: the slab's owner gets the same call."""

    def on_request(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the slab's owner gets the same call."""

    def hint(self, keys: Sequence[bytes], hint: Hint) -> None:
        """Do nothing: the slab's owner gets the same call."""

    def take_changes(self) -> list[Change]:
        """Return nothing: the slab's owner knows its changes."""
        return []

    def num_found(self, keys: Sequence[bytes], num_before: int = 0) -> int:
        are_there = self.find(keys)
        return are_there.index(False) if False in are_there else len(keys)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        if not (digest := self._digest()):
            return [False] * len(keys)
        return _there(self._tier.find([block_key(digest, key) for key in keys], FIND_S))

    def load(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        if not (digest := self._digest()):
            return [False] * len(keys)
        return _there(self._tier.get([block_key(digest, key) for key in keys], blocks, READ_S))

    def store(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        return [False] * len(keys)

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Do nothing: the slab's owner decides what is worth reading."""

    def clear(self) -> None:
        """Do nothing: the slab's owner clears it."""

    def close(self) -> None:
        self._tier.close()


def _are_stored(found: LocatedBlocks) -> list[bool]:
    return [code == STORAGE for code in found.codes]


def _there(outcomes: Sequence[Outcome]) -> list[bool]:
    return [outcome is Outcome.THERE for outcome in outcomes]
