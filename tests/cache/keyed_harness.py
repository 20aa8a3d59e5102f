"""A cache for engines that bring their own keys, and the orders to its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import Done, Hello, RankMover, RankOrder, RecoveredBlocks, Report
from kvtier.core.keys import next_key
from kvtier.core.types import DEVICE, DISK, HOST, BlockKey, Direct
from kvtier.index import State, make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from kvtier.tiers import DistantAllocator, Quota, SlotAllocator, StorageFacts

KEYS = [bytes([number // 2, number // 2, number % 2]) for number in range(10)]
"""Two for each place in a prompt, where the last byte names the KV group."""
NS = b"n" * 32
BLOCK_BYTES = 64
PATIENCE_S = 0.1
NUM_STORED = 1000
"""Capacity, in blocks, of the cache's record of each store."""


def name(key: bytes) -> BlockKey:
    """Return the name of the block in storage."""
    return next_key(NS, key)


def names(order: RankOrder) -> tuple[BlockKey, ...]:
    return tuple(each.key for each in order.names)


class Engine:
    """A cache, and the orders to its ranks."""

    def __init__(
        self,
        num_host: int = 4,
        num_disk: int = 8,
        num_ranks: int = 1,
        says_hello: bool = True,
        bytes_per_day: int = 0,
        stores: Sequence[str] = (),
        clock: Callable[[], float] | None = None,
        direct: Direct = Direct.OFF,
        policy: str = LRU,
        group_bytes: int = 0,
    ) -> None:
        facts = {DISK: StorageFacts(finds_at_once=True, direct=direct)}
        facts |= dict.fromkeys(stores, StorageFacts(is_shared=True))
        self.num_ranks = num_ranks
        ticks = count()
        clock = clock or (lambda: float(next(ticks)))
        self.mover = RankMover(
            facts, BLOCK_BYTES, num_ranks, num_ranks, PATIENCE_S, clock, device=DEVICE
        )
        self.host = DistantAllocator(num_host)
        rooms: dict[str, SlotAllocator] = {HOST: self.host, DISK: Quota(lambda: num_disk)}
        rooms |= {name: Quota(lambda: NUM_STORED) for name in stores}
        self.index = make_key_index(dict.fromkeys(rooms, policy), lambda: NS, group_bytes)
        self.cache = LocalBlockCache(
            self.index,
            rooms,
            self.mover,
            LadderOptions(
                BLOCK_BYTES,
                bytes_per_day={DISK: bytes_per_day},
                lookup_patience_s=PATIENCE_S,
            ),
            lambda: NS,
            clock,
            device=DEVICE,
            metrics=Metrics(),
            knows_storage=lambda: self.mover.is_complete,
        )
        self.ladder = self.cache.ladder
        for rank in range(num_ranks if says_hello else 0):
            self.hello(rank)

    def hello(
        self,
        rank: int,
        *found: BlockKey,
        num_open: int | None = None,
        direct: frozenset[str] = frozenset({DISK}),
    ) -> None:
        num_open = self.host.num_slots if num_open is None else num_open
        kept = {DISK: RecoveredBlocks(len(found), b"".join(found))}
        self.hear(Report(hellos={rank: Hello(num_open, kept, direct)}))

    def hear(self, report: Report) -> None:
        self.mover.hear(report)
        self.host.open(self.mover.num_open)
        self.cache.poll()

    def finish(self, order: RankOrder, done: Done) -> None:
        self.hear(Report(done={order.order_id: done}))

    def store(self, keys: Sequence[bytes]) -> None:
        room = self.cache.reserve(keys)
        assert room is not None
        self.cache.commit(room.keys, range(len(room.keys)))

    def fill(self, keys: Sequence[bytes]) -> None:
        """Store blocks one after the other, and carry out what is ordered for each."""
        for key in keys:
            self.store([key])
            self.carry_out()

    def carry_out(self, failed: Sequence[int] = (), gone: Sequence[int] = ()) -> list[RankOrder]:
        """Carry out all orders, also those that follow. Every rank reports the same outcome."""
        carried = []
        while orders := self.mover.take_orders():
            for order in orders:
                done = Done(frozenset([*failed, *gone]), frozenset(gone), num_ranks=self.num_ranks)
                self.finish(order, done)
            carried += orders
        return carried

    def find(self, key: bytes) -> BlockState:
        """Return the location of a block. A block that storage recovered is adopted."""
        self.cache.adopt([key])
        return self.cache.locate(key)

    def places(self, keys: Sequence[bytes]) -> list[BlockState]:
        return [self.find(key) for key in keys]

    def in_tier(self, tier: str) -> set[bytes]:
        position = self.index.tiers.index(tier)
        return {each.key for each in self.index.known() if each.places[position][0] is State.READY}

    def check(self) -> None:
        self.cache.check_invariants()
