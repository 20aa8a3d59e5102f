"""Requests of a trace through kvtier's own tiers: index, ladder and policy, as under vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.policies.traces import Keys
from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer import FindJob, Job, Move, Mover
from kvtier.core.types import DISK, HOST, BlockKey
from kvtier.index import make_key_index
from kvtier.tiers import DistantAllocator, Quota, SlotAllocator, StorageFacts

BLOCK_BYTES = 1 << 20
KEY_BYTES = 8
NAMESPACE = bytes(32)
PREFIX = (BlockState.MEMORY, BlockState.STORAGE)


class TierReplay:
    """A host tier of ``capacity_blocks``, above a disk of ``disk_blocks`` or none.

    Copies take no time. Requested blocks are read from the disk. The others are stored at once, if
    they are admitted. The interface is that of ``PolicyReplay``.

    Args:
        policy: its name.
        capacity_blocks: capacity of host memory.
        disk_blocks: capacity of the disk; 0 for no disk.
        bytes_per_day: limit of the bytes written to the disk, with blocks of 1 MiB; 0 for no limit.
        doubles_at_blocks: depth in a prompt at which a block takes twice as long to compute as the
            first one, as the planner would have measured; 0 if all take equally long.
    """

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        disk_blocks: int = 0,
        bytes_per_day: int = 0,
        doubles_at_blocks: float = 0.0,
    ) -> None:
        self.policy = policy
        self.num_from_host = 0
        """Number of hits in host memory."""
        self.num_history = 0
        """Always 0: the history is not counted here."""
        self._now = 0.0
        self._num_stored = 0
        host = DistantAllocator(capacity_blocks)
        host.open(capacity_blocks)
        rooms: dict[str, SlotAllocator] = {HOST: host}
        if disk_blocks:
            rooms[DISK] = Quota(lambda: disk_blocks)
        self._mover = AtOnce([tier for tier in rooms if tier != HOST])
        self._index = make_key_index(dict.fromkeys(rooms, policy), lambda: NAMESPACE)
        options = LadderOptions(BLOCK_BYTES, bytes_per_day={DISK: bytes_per_day})
        if doubles_at_blocks:
            self._index.set_recompute_slope(doubles_at_blocks)
        self._cache = LocalBlockCache(
            self._index, rooms, self._mover, options, lambda: NAMESPACE, self._clock
        )
        self._ladder = self._cache.ladder

    def _clock(self) -> float:
        return self._now

    def request(self, keys: Keys, now_s: float) -> int:
        self._now = now_s
        text = keys.tobytes()
        path = [text[at : at + KEY_BYTES] for at in range(0, len(text), KEY_BYTES)]
        places = self._cache.locate_all(path)
        self._cache.on_request(path)
        found = next((at for at, it in enumerate(places) if it not in PREFIX), len(path))
        hits = self._bring(path[:found])
        self.num_from_host += places[:hits].count(BlockState.MEMORY)
        room = self._cache.reserve(path[hits:])  # as vLLM, which holds no found blocks
        if room is None:  # as many as there is room for
            room = self._cache.reserve(path[hits : hits + self._ladder.num_available(HOST)])
        if room is not None:
            self._cache.commit(room.keys, range(len(room.keys)))
            self._num_stored += len(room.keys)
        self._settle()
        self._cache.touch(path)  # as vLLM reports a finished request
        self._cache.take_changes()
        return hits

    def _bring(self, path: Sequence[bytes]) -> int:
        """Load blocks into host memory, and from there to the device. Return how many."""
        hits = self._cache.promote(path, path) if DISK in self._ladder.storages else len(path)
        self._settle()
        self._cache.hold(path[:hits])
        self._cache.release(path[:hits])
        return hits

    def _settle(self) -> None:
        while self._ladder.is_busy:
            self._cache.poll()

    @property
    def num_stored(self) -> int:
        """Number of blocks that reached the slowest tier."""
        return self._mover.num_moved[DISK] if DISK in self._ladder.storages else self.num_in_host

    @property
    def num_in_host(self) -> int:
        """Number of blocks that reached host memory, from the device and from the disk."""
        return self._num_stored + self._mover.num_moved[HOST]

    @property
    def num_blocks(self) -> int:
        return self._index.num_held(HOST)

    @property
    def num_bytes(self) -> int:
        return int(getattr(self._index, "num_bytes", 0))

    def check_invariants(self) -> None:
        self._ladder.check_invariants(0)


class AtOnce(Mover):
    """Mover whose copies are complete at once. ``num_moved`` counts blocks by destination."""

    def __init__(self, storages: Sequence[str]) -> None:
        self.storages = {name: StorageFacts(finds_at_once=True) for name in storages}
        self.num_moved: Counter[str] = Counter()

    def begin(self, move: Move, urgent: bool = True) -> Job:
        self.num_moved[move.dst] += move.num_blocks
        job = Job(move.num_blocks * BLOCK_BYTES)
        job.finish()
        return job

    def find(self, tier: str, keys: Sequence[BlockKey]) -> FindJob:
        job = FindJob()
        job.finish()
        return job

    def drop(self, tier: str, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        return

    def queued_s(self, route: tuple[str, str], copy_s: Callable[[int], float]) -> float:
        return 0.0

    def close(self, timeout_s: float) -> set[str]:
        return set()
