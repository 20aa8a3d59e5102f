"""Copies the hottest blocks of a store into a directory in front of it, while tiers are idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Final, Protocol

import numpy as np

from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.lane import Lane
from kvtier.cache.transfer.mover import Warmed
from kvtier.core.errors import TierError
from kvtier.core.types import BlockKey, BlockName
from kvtier.tiers import Outcome, Pieces, StorageTier
from kvtier.tiers.remote.migration import hottest_batches, learn
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.remote.warm_start import WarmDirectory, WarmStart
from kvtier.tiers.wrappers import ShardTier

logger = logging.getLogger(__name__)

ABSENT = Outcome.ABSENT
REST_SHARE: Final = 1.0
"""Pause after each batch, in multiples of its duration. So the copy takes at most half of the
bandwidth of one reader. The option ``bytes_per_s`` of the URL limits it further."""
LOOK_S: Final = 0.01
"""Interval at which it checks whether the tiers are idle."""
MAX_FAILED: Final = 3
"""Number of consecutive failed batches after which the copy ends."""
CLOSE_S: Final = 5.0
FIND_S: Final = 10.0
"""Time limit of a look-up. No request waits for it."""
NAMESPACE: Final = b""
"""Stores find blocks by their keys alone."""


class Calls(Protocol):
    """Calls of one kind of a storage tier, behind its circuit breaker."""

    lane: Lane

    def submit(
        self,
        call: Callable[[list[int] | None, float], list[Outcome]],
        keys: Sequence[BlockKey],
        block_bytes: int,
        urgent: bool,
    ) -> Job: ...


class WarmCopier:
    """Copies blocks in a thread of its own, a batch at a time, through the lanes of both tiers.

    A batch begins only while no read of either tier and no write to the directory is queued or
    running, so a request waits for one batch at most. Keys are the stores' own: shards of a block
    are copied like blocks.

    Args:
        warm: what to copy.
        storages: storage tiers by name.
        calls: their calls, by name and kind: "find", "read", "write".
    """

    def __init__(
        self,
        warm: WarmStart,
        storages: Mapping[str, StorageTier],
        calls: Mapping[tuple[str, str], Calls],
    ) -> None:
        self._warm = warm
        self._far, self._near = _store_of(storages[warm.far]), _store_of(storages[warm.near])
        self._calls = calls
        self._ending = Event()
        self._lock = Lock()
        self._done: list[Warmed] = []
        self._num_blocks = self._num_there = 0
        self._keeper = make_keeper(warm.far_url)
        self._directory = WarmDirectory(warm.near_url)
        self._thread = Thread(target=self._run, name="kvtier warm start", daemon=True)
        self._thread.start()

    def take(self) -> list[Warmed]:
        """Return what was copied since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Stop after the current batch. Call it before the lanes are closed."""
        self._ending.set()
        with suppress(Exception):  # the thread uses it meanwhile
            self._keeper.close()

    def join(self) -> None:
        """Wait for the thread, a few seconds at most. Call it after the lanes were closed."""
        self._thread.join(CLOSE_S)
        self._directory.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        began_s, level = time.monotonic(), logging.INFO
        try:
            reason = self._copy_all()
        except Exception as error:  # requests are served without it
            reason, level = str(error) or repr(error), logging.WARNING
        if self._ending.is_set():
            reason, level = "the process ends", logging.INFO
        logger.log(
            level,
            "warm start ended from=%s into=%s blocks=%d bytes=%d there_before=%d seconds=%.1f%s",
            self._warm.far,
            self._warm.near,
            self._num_blocks,
            self._num_blocks * self._far.bytes_per_block,
            self._num_there,
            time.monotonic() - began_s,
            f" reason={reason!r}" if reason else "",
        )

    def _copy_all(self) -> str:
        """Copy all batches. Return why it ended early; "" if it did not."""
        warm, size = self._warm, self._far.bytes_per_block
        if not self._directory.lock(warm.far_url, size):
            return "another process of this machine copies"
        learn(self._far)
        num_failed = 0
        for batch in hottest_batches(self._keeper, warm.max_bytes, size):
            if not self._wait_for_idle():
                break
            began_s = time.monotonic()
            new = self._where(ABSENT, warm.near, self._near, batch.keys)
            self._num_there += len(batch.keys) - len(new)
            if not new:
                continue
            if not self._directory.reserve(len(new) * size):
                return "the directory has no room for more"
            num_failed = 0 if self._copy(new) else num_failed + 1
            if num_failed == MAX_FAILED:
                reason = self._far.last_error or self._near.last_error or "no answer"
                raise TierError(warm.far, "warm start", reason)
            self._ending.wait(REST_SHARE * (time.monotonic() - began_s))
        has_any = self._num_blocks or self._num_there
        return "" if has_any else f"the store has no blocks of {size} bytes that can be read here"

    def _wait_for_idle(self) -> bool:
        """Wait until the tiers are idle. Return False if the process ends."""
        kinds = (self._warm.far, "read"), (self._warm.near, "read"), (self._warm.near, "write")
        lanes = [self._calls[kind].lane for kind in kinds]
        while not self._ending.is_set() and not all(lane.is_idle for lane in lanes):
            self._ending.wait(LOOK_S)
        return not self._ending.is_set()

    def _copy(self, keys: Sequence[BlockKey]) -> bool:
        """Copy blocks that the directory lacks. Return False if a store fails."""
        warm, size = self._warm, self._far.bytes_per_block
        memory = np.empty((len(keys), size), np.uint8)
        rows = Pieces.whole(memory.ctypes.data + size * np.arange(len(keys)), size)

        def get(at: list[int] | None, timeout_s: float) -> list[Outcome]:
            at = [*range(len(keys))] if at is None else at
            return self._far.get([keys[each] for each in at], rows.pick(at), timeout_s)

        read = self._calls[warm.far, "read"].submit(get, keys, size, urgent=False)
        if not _ended(read) or not read.lost <= read.gone:
            return False
        there = [at for at in range(len(keys)) if at not in read.lost]
        some, arrived = [keys[at] for at in there], rows.pick(there)
        if not some:  # of another codec, key or secret, or gone by now
            return True

        def put(at: list[int] | None, timeout_s: float) -> list[Outcome]:
            at = [*range(len(some))] if at is None else at
            names = [BlockName(NAMESPACE, 0, some[each]) for each in at]
            return self._near.put(names, arrived.pick(at), timeout_s)

        write = self._calls[warm.near, "write"].submit(put, some, size, urgent=False)
        if not _ended(write) or len(write.lost) == len(some):
            return False
        written = [key for at, key in enumerate(some) if at not in write.lost]
        # What was deleted between read and write must not come back.
        if deleted := self._where(ABSENT, warm.far, self._far, written):
            self._on_find_lane(warm.near, lambda: self._near.drop(deleted, for_good=True))
        num = len(written) - len(deleted)
        self._num_blocks += num
        with self._lock:
            self._done.append(Warmed(warm.near, num, num * size))
        return True

    def _where(
        self, wanted: Outcome, name: str, tier: StorageTier, keys: Sequence[BlockKey]
    ) -> list[BlockKey]:
        """Return the keys whose look-up in a tier has this outcome; none if it fails."""
        found: list[Outcome] = []
        self._on_find_lane(name, lambda: found.extend(tier.find(keys, FIND_S)))
        return [key for key, outcome in zip(keys, found, strict=False) if outcome is wanted]

    def _on_find_lane(self, name: str, call: Callable[[], object]) -> None:
        """Make a call of a tier on the thread that makes its look-ups, and wait for it."""

        def work(job: Job) -> tuple[int, ...]:
            del job
            call()
            return ()

        _ended(self._calls[name, "find"].lane.submit(work, 0, urgent=False))


def _ended(job: Job) -> bool:
    """Wait until a job has ended. Return False for an error; storage calls have time limits."""
    job.wait()
    return job.error is None


def _store_of(tier: StorageTier) -> StorageTier:
    """Return the store itself, without ``ShardTier``: a keeper lists the keys of the store."""
    while isinstance(tier, ShardTier):
        tier = tier.inner
    return tier
