"""Calls of an engine's threads to a slab; each waits for its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import inf
from threading import Condition, Lock

import numpy as np

from kvtier.connectors.common.block_slab import BlockSlab, FinishedJob, Look
from kvtier.connectors.common.call_memory import CallMemory, SpareMemory
from kvtier.connectors.common.names import block_key
from kvtier.errors import TierError
from kvtier.index.policies.replayed import LRU
from kvtier.keyed.reuse import FoundBlocks, LoadUpTo, Waited, decide, num_to_probe
from kvtier.plan import Costs
from kvtier.telemetry import Metrics
from kvtier.tiers import Outcome, Pieces, StorageTier

CALL_BLOCKS = 256
"""Blocks that a call moves at a time; a longer call moves them in several turns."""
NUM_CALLS = 8
"""Calls that may be moving blocks at a time. There is room for as many again: a quarter of the
memory may be on its way to storage."""
PIECE_BYTES = 128 << 20
"""Bytes read or written at a time: the caller waits for all of them."""
MOST_PREFILLS = 256
LOOK_S = 1.0
"""Longest pause between two looks of a caller, whatever it hears."""
ANSWER_S = 0.5
"""Time that a look-up waits for a store to say what it has. Once a store took longer, nobody waits
until it answers in time."""
GLANCE_S = 0.002
"""Age up to which calls of one look-up use what an earlier one has seen."""
FIND_S = 1.0
READ_S = 10.0
"""Time limits in a slab of another process; a block that takes longer counts as absent."""


class SlabCalls:
    """Blocks by the engine's keys, of 32 bytes, wherever in memory each call has them.

    sizes: int64 [num_pieces], bytes of each piece of a block. digest: of the namespace, b"" while
    nobody knows it: nothing is found then, and nothing stored. hold_s: how long a block that was
    found stays for whoever asked. late_s: a read that takes longer means that nothing can be
    found for now. block_tokens: in a block, for a planner that leaves what is faster to compute
    than to read, unless always_loads; 0 for none. policy, metrics: see ``BlockSlab``. clock:
    seconds.

    The caller guarantees
        the memory of a call's blocks is alive and touched by nobody else until the call returns.
    Outcomes and errors
        nothing raises: what can't be stored or loaded is not there. A call returns when nothing of
        it is under way any more.
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
        self._prefills: deque[tuple[int, int, float]] = deque(maxlen=MOST_PREFILLS)
        self._probed_s = clock()
        self.num_recomputed = 0
        """Blocks that were found, and not told of: computing them is faster."""
        num_slots = 4 * CALL_BLOCKS * NUM_CALLS
        self._memory = CallMemory(np.array(sizes, np.int64), num_slots)
        self._finds_at_once = tier.facts.finds_at_once
        self._slab = BlockSlab(
            tier,
            self._memory,
            b"",
            most_queued=num_slots,
            bytes_per_day=bytes_per_day,
            piece_bytes=PIECE_BYTES,
            lookup_patience_s=ANSWER_S,
            tells_changes=False,
            policy=policy,
            metrics=metrics,
            clock=clock,
        )
        self._lock = Lock()  # around the slab, which belongs to one thread at a time
        self._bell = Condition(Lock())
        self._num_rings = 0
        self._jobs = count()
        self._probes: dict[int, SpareMemory] = {}
        self._finished: dict[int, FinishedJob] = {}
        self._tended_s, self._num_heard = -inf, 0
        self._snapshot: Costs | None = None
        self._slab.ladder.transfers.tell_of_ends(self._ring)

    @property
    def learns(self) -> bool:
        """Whether a policy wants to hear of requests."""
        return self._slab.learns

    def on_request(self, keys: Sequence[bytes]) -> None:
        """Report a request that begins, to policies that learn.

        keys: its whole prompt, from the first block on. Call it once per request.
        """
        with self._lock:
            self._slab.on_request(keys)

    def num_found(self, keys: Sequence[bytes], num_before: int = 0) -> int:
        """Return how many of the first of ``keys`` are found.

        They stay for ``hold_s``, or until they are loaded, and count as used then. num_before:
        blocks of the prompt that come before.
        """
        self._ask(keys)
        with self._lock:
            look = self._look(keys)
            num = look.num_first
            if num and self._block_tokens:
                num = self._worth(num_before, num, keys)
            self._slab.hold_until(look.first(num), self._clock() + self._hold_s)
            return num

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """The same for each of ``keys``, whatever comes before it."""
        self._ask(keys, has_gaps=True)
        with self._lock:
            look = self._look(keys)
            self._slab.hold_until(look.there(), self._clock() + self._hold_s)
            return look.flags()

    def _ask(self, keys: Sequence[bytes], has_gaps: bool = False) -> None:
        """Ask storage that answers later, and wait without holding up other callers."""
        ends_s = time.monotonic() + ANSWER_S
        while not self._finds_at_once:
            with self._lock:
                self._glance()
                _, questions = self._slab.begin_lookup(keys, has_gaps)
            for each in questions:
                each.job.wait(max(0.0, ends_s - time.monotonic()))
            if not questions or time.monotonic() >= ends_s:
                return
            with self._lock:
                self._slab.ladder.storage_lookup.hear()

    def _look(self, keys: Sequence[bytes]) -> Look:
        self._glance()
        if self._slab.reads_for_s > self._late_s:
            return Look.nothing(len(keys))
        return self._adopt_and_look(keys)

    def _adopt_and_look(self, keys: Sequence[bytes]) -> Look:
        """Look keys up. Blocks that a restart found are adopted, and count as used."""
        look = self._slab.look(keys)
        if look.has_unknown and (adopted := self._slab.adopt_recovered(keys)):
            self._slab.touch(adopted)
            look = self._slab.look(keys)
        return look

    def _worth(self, num_before: int, num_found: int, keys: Sequence[bytes]) -> int:
        """Return how many of the found blocks to report.

        All, or none if computing them is faster.
        """
        first, end = (num * self._block_tokens for num in (num_before, num_before + num_found))
        found = FoundBlocks(
            first,
            num_tokens=end,
            ready=[end],
            reachable=[end],
            sources=lambda end: [self._tier_name] * num_found,
            # Reading costs a line, and computing the rest a line less a square: their sum is lowest
            # at an end, so that there is nothing between all and none.
            block_size=0,
            bytes_per_block=self._bytes_per_block,
        )
        now_s, alone = self._clock(), Waited(may_wait=False)
        decision = decide(found, alone, self._costs, now_s, always_loads=self._always_loads)
        if isinstance(decision, LoadUpTo):
            self._slab.ladder.account.planned(num_found, 0)
            return num_found
        self._slab.ladder.account.planned(0, num_found)
        self.num_recomputed += num_found
        num = num_to_probe(num_found, self._block_tokens, now_s - self._probed_s)
        if num and not self._probes:
            self._probed_s = now_s
            self._probe(keys[:num])
        return 0

    def _probe(self, keys: Sequence[bytes]) -> None:
        """Read blocks that nobody waits for, to measure what reading takes now."""
        job = next(self._jobs)
        spare = self._probes[job] = SpareMemory(self._memory, len(keys))
        self._slab.load(job, keys, spare.slots)

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Computing so many tokens after others took so long. Never waits: on whatever thread."""
        self._prefills.append((num_before, num_tokens, seconds))

    def load(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        """Read blocks; which of them are in place. Memory of the others may hold anything.

        before: the keys of the prompt that come before, which count as used as well.
        """
        done: list[bool] = []
        began_s = self._clock()
        for at in range(0, len(keys), CALL_BLOCKS):
            some = slice(at, at + CALL_BLOCKS)
            done += self._load(keys[some], blocks.pick(some), [*before, *keys[:at]])
        num = done.index(False) if False in done else len(done)
        first, end = (self._block_tokens * each for each in (len(before), len(before) + num))
        with self._lock:
            self._slab.ladder.account.hit(self._tier_name, sum(done))
            self._slab.ladder.account.saved(first, end, self._clock() - began_s)
        return done

    def _load(self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._tend()
            slots = self._memory.place(blocks)
            self._slab.load(job := next(self._jobs), keys, slots)
        arrived = set(self._wait(job).keys)
        with self._lock:
            self._memory.take_back(slots)
            self._slab.let_go(keys)
            self._slab.touch([*before, *keys])
        place = {key: at for at, key in enumerate(keys)}  # of a key that is there twice, the last
        return [key in arrived and place[key] == at for at, key in enumerate(keys)]

    def store(
        self, keys: Sequence[bytes], blocks: Pieces, before: Sequence[bytes] = ()
    ) -> list[bool]:
        """Write blocks that are not there yet.

        Which are there now, or were left out, for they are not worth their room. Nothing is begun
        after a failure: a prompt without its beginning is of no use.

        keys: in prompt order. before: those of the prompt that come before.
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
            self._slab.touch(prompt)  # what makes room for it is not its beginning
            if self._slab.learns and before:
                self._slab.continues(keys, before[-1])
            are_there = self._adopt_and_look(keys).flags()
            new = [at for at, is_there in enumerate(are_there) if not is_there]
            slots = self._memory.place(blocks.pick(new))
            job = next(self._jobs)
            depths = [len(before) + at for at in new]
            self._slab.store(job, [keys[at] for at in new], depths, slots)
        left_out = set(self._wait(job).left_out)
        with self._lock:
            self._memory.take_back(slots)
            self._slab.touch(prompt)
            are_there = self._slab.look(keys).flags()
        pairs = zip(keys, are_there, strict=True)
        return [is_there or key in left_out for key, is_there in pairs]

    def clear(self) -> None:
        """Forget everything, for good."""
        with self._lock:
            self._slab.clear()

    def close(self) -> None:
        """Finish what is under way, and give the slab to its next owner. As ``BlockSlab``."""
        with self._lock:
            try:
                self._slab.close()
            except TierError:
                for spare in self._probes.values():
                    spare.abandon()
                raise
            self._collect()

    # -- waiting -----------------------------------------------------------------------------------

    def _glance(self) -> None:
        """``_tend``, unless somebody has only just done so.

        A prompt is looked up in several calls.
        """
        has_news = self._prefills or self._num_rings != self._num_heard
        if has_news or self._clock() - self._tended_s >= GLANCE_S:
            self._tend()

    def _tend(self) -> None:
        """Notice what has become known meanwhile, and what is over."""
        self._tended_s, self._num_heard, self._snapshot = self._clock(), self._num_rings, None
        while self._prefills:
            self._slab.ladder.account.observe_prefill(*self._prefills.popleft())
        self._slab.digest = self._digest()
        self._collect()

    def _costs(self) -> Costs:
        """Return the costs of reading and computing, as of the last tending."""
        if self._snapshot is None:
            self._snapshot = self._slab.ladder.cost_snapshot()
        return self._snapshot

    def _collect(self) -> None:
        finished = self._slab.take_finished()
        for job in finished:
            if spare := self._probes.pop(job.job_id, None):
                spare.close()
            else:
                self._finished[job.job_id] = job
        if finished:
            self._ring()

    def _wait(self, job: int) -> FinishedJob:
        """Until the job is finished. Whoever is first to look finishes those of others, too."""
        while True:
            num_rings = self._num_rings
            with self._lock:
                self._collect()
                if job in self._finished:
                    return self._finished.pop(job)
            with self._bell:
                self._bell.wait_for(partial(self._has_rung, num_rings), LOOK_S)

    def _has_rung(self, num_rings: int) -> bool:
        return self._num_rings != num_rings

    def _ring(self) -> None:
        """Something has ended. Never waits for the slab: a thread of the slab's own calls."""
        with self._bell:
            self._num_rings += 1
            self._bell.notify_all()


class SlabReads:
    """Reads of a slab that another process owns.

    Nothing is stored, held or counted as used: the owner is asked the same and does that.
    """

    def __init__(self, tier: StorageTier, digest: Callable[[], bytes]) -> None:
        self._tier = tier
        self._digest = digest

    learns = False
    """Its owner does."""

    def on_request(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the slab's owner is told."""

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
        """Its owner decides what is worth reading."""

    def clear(self) -> None:
        """Do nothing: the slab's owner clears it."""

    def close(self) -> None:
        self._tier.close()


def _there(outcomes: Sequence[Outcome]) -> list[bool]:
    return [outcome is Outcome.THERE for outcome in outcomes]
