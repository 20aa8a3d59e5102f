"""Which chunk of KV is where, host memory or disk, and what moves between the two.

    store ----> host --- demote ----> disk          a chunk on its way is held where it comes from,
                 ^                      |           and has room where it goes to
    load  <------+------- promote ------+

One process decides for all ranks. A move is done when every rank has said so; what one rank could
not move has not moved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtier.connectors.vllm.chunks import ChunkIndex, ChunkState, HostIndex, Room
from kvtier.connectors.vllm.orders import Done, Hello, Move, Order
from kvtier.types import DISK, HOST, BlockKey, Slot


class Place(Enum):
    """Where a chunk is found."""

    NOWHERE = "nowhere"
    ARRIVING = "arriving"
    """On its way into host memory."""
    HOST = "host"
    DISK = "disk"
    UNKNOWN = "unknown"
    """The ranks have not yet said what is on their disks."""


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that came to a tier, or left it."""

    keys: list[bytes]
    tier: str
    is_removed: bool


NOTHING = Done(num_ranks=0)


@dataclass(slots=True)
class _Moving:
    order: Order
    keys: list[bytes]
    num_ranks_left: int
    done: Done = NOTHING
    is_void: bool = False


class Placement:
    """Owned by one thread. Keys are the engine's; ``name`` gives what a chunk is called on disk.

    num_host_slots: of each rank; they open as the ranks say. num_disk_chunks: 0 without a disk.
    num_ranks: that say hello. num_disk_ranks: those of them that have a disk. num_moving: chunks
    that may be on their way to the disk at a time.
    """

    def __init__(
        self,
        num_host_slots: int,
        num_disk_chunks: int,
        name: Callable[[bytes], BlockKey],
        num_ranks: int = 1,
        num_disk_ranks: int = 1,
        num_moving: int = 64,
    ) -> None:
        self.namespace: bytes | None = b""
        """Digest of what chunks on disk belong to; while it is None nobody knows what they are
        called, and the disk is left alone."""
        self.host = HostIndex(num_host_slots)
        self.disk = ChunkIndex(num_disk_chunks)
        self._num_not_demoted = 0
        self._name = name
        self._num_ranks = num_ranks
        self._num_disk_ranks = num_disk_ranks if num_disk_chunks else 0
        self._num_moving = num_moving
        self._hellos: dict[int, Hello] = {}
        self._found: dict[int, tuple[BlockKey, ...]] = {}
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # to be demoted: key -> depth
        self._from_disk: set[bytes] = set()
        self._key_of: dict[bytes, bytes] = {}
        self._orders: list[Order] = []
        self._moving: dict[int, _Moving] = {}
        self._num_orders = 0
        self._changes: list[Change] = []

    # -- what is where -----------------------------------------------------------------------------

    @property
    def has_disk(self) -> bool:
        return self.disk.capacity > 0

    @property
    def is_complete(self) -> bool:
        """Every rank has said what it has."""
        return len(self._hellos) >= self._num_ranks and len(self._found) >= self._num_disk_ranks

    @property
    def is_moving(self) -> bool:
        """Something is on its way, or should be."""
        waits = self._waiting and self.namespace is not None
        return bool(self._moving or self._orders or waits)

    @property
    def num_promoting(self) -> int:
        """Chunks on their way from the disk."""
        return sum(
            len(each.keys) for each in self._moving.values() if each.order.move is Move.PROMOTE
        )

    def find(self, key: bytes) -> Place:
        """Where ``key`` is. Changes nothing."""
        match self.host.state(key):
            case ChunkState.READY:
                return Place.HOST
            case ChunkState.WRITING:
                return Place.ARRIVING
        if not self.has_disk or self.namespace is None:
            return Place.NOWHERE
        if not self.is_complete:
            return Place.UNKNOWN
        is_on_disk = self.disk.state(self._name(key)) is ChunkState.READY
        return Place.DISK if is_on_disk else Place.NOWHERE

    def origin(self, key: bytes) -> str:
        """The tier that a ready chunk came from: the disk, until it was loaded once."""
        return DISK if key in self._from_disk else HOST

    def touch(self, keys: Collection[bytes]) -> None:
        """They were used just now, in prompt order."""
        self.host.touch(keys)
        if self.has_disk and self.namespace is not None:
            self.disk.touch([self._name(key) for key in keys])

    # -- between device and host -------------------------------------------------------------------

    def hold(self, keys: Collection[bytes]) -> list[Slot]:
        """Slots of ready chunks, for a load. They stay until ``release``."""
        self.host.hold(keys)
        return self.host.slots(keys)

    def release(self, keys: Collection[bytes]) -> None:
        """A load has ended."""
        self.host.release(keys)
        self._from_disk.difference_update(keys)

    def distrust(self, slots: Collection[Slot]) -> None:
        """A copy from or to these slots went wrong on some rank: their chunks are not there."""
        keys = self.host.keys_in(slots)
        self._leave_host(keys)
        self.host.lose(keys)

    def reserve(self, keys: Collection[bytes]) -> Room | None:
        """Room in host memory for those that are not there; None where there is too little."""
        room = self.host.reserve(keys)
        if room is not None:
            self._leave_host(room.evicted)
        return room

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_disk: bool = True) -> None:
        """Chunks are stored on all ranks; they go on to the disk when it has time."""
        stored = {
            key: depth
            for key, depth in zip(keys, depths, strict=True)
            if self.host.state(key) is ChunkState.WRITING
        }
        self.host.commit(keys)
        self._change(list(stored), HOST)
        if self.has_disk and to_disk:
            self._waiting.update(stored)

    def abort(self, keys: Iterable[bytes]) -> None:
        """Chunks were not stored."""
        self.host.abort(keys)

    def clear(self) -> None:
        """Forget everything, on the disk as well. What is on its way arrives nowhere."""
        moving = {key for each in self._moving.values() for key in each.keys}
        named = {name for each in self._moving.values() for name in each.order.keys}
        for each in self._moving.values():
            each.is_void = True
        self._waiting.clear()
        self._from_disk.clear()
        self.host.clear(moving)
        self._forget([name for name in self.disk if name not in named])
        self.disk.clear(named)
        self._key_of.clear()

    # -- between host and disk ---------------------------------------------------------------------

    def promote(self, keys: Sequence[bytes], depths: Sequence[int]) -> int:
        """Bring chunks from the disk to host memory; fewer of the first ones where there is no room
        for all. Returns how many."""
        num = len(keys)
        room = None
        while num and (room := self.reserve(keys[:num])) is None:
            num //= 2
        if room is None or not room.keys:
            return num
        depth_of = dict(zip(keys, depths, strict=True))
        names = [self._name(key) for key in room.keys]
        self.disk.touch(names)
        self.disk.hold(names)
        self._begin(Move.PROMOTE, room.keys, names, [depth_of[key] for key in room.keys])
        return num

    def take_orders(self) -> list[Order]:
        """What the ranks are to do next. Demotes some of what waits for it."""
        self._demote()
        orders, self._orders = self._orders, []
        return orders

    def _demote(self) -> None:
        if self.namespace is None:
            return
        on_the_way = sum(
            len(each.keys) for each in self._moving.values() if each.order.move is Move.DEMOTE
        )
        depths: dict[bytes, int] = {}
        while self._waiting and len(depths) + on_the_way < self._num_moving and self.is_complete:
            key, depth = self._waiting.popitem(last=False)
            if self.disk.state(self._name(key)) is ChunkState.ABSENT:
                depths[key] = depth
        named: dict[bytes, bytes] = {self._name(key): key for key in depths}
        room = self.disk.reserve(named) if named else None
        if room is None:  # what is on the disk is on its way somewhere, all of it
            self._num_not_demoted += len(named)
            return
        self._leave_disk(room.evicted)
        keys = [named[name] for name in room.keys]
        self.host.hold(keys)
        self._key_of.update(zip(room.keys, keys, strict=True))
        self._begin(Move.DEMOTE, keys, room.keys, [depths[key] for key in keys], room.evicted)

    def _begin(
        self,
        move: Move,
        keys: list[bytes],
        names: Sequence[bytes],
        depths: Sequence[int],
        evicted: Sequence[bytes] = (),
    ) -> None:
        order = Order(
            self._next_id(),
            move,
            tuple(map(BlockKey, names)),
            tuple(self.host.slots(keys)),
            tuple(depths),
            tuple(map(BlockKey, evicted)),
            self.namespace or b"",
        )
        self._orders.append(order)
        self._moving[order.order_id] = _Moving(order, keys, self._num_disk_ranks)

    def _forget(self, names: Sequence[bytes]) -> None:
        if names:
            order = Order(self._next_id(), Move.FORGET, tuple(map(BlockKey, names)))
            self._orders.append(order)

    def _next_id(self) -> int:
        self._num_orders += 1
        return self._num_orders

    # -- what the ranks say ------------------------------------------------------------------------

    def meet(self, rank: int, hello: Hello) -> None:
        """A rank tells about itself. What a restart found counts where all ranks have found it."""
        self._hellos[rank] = hello
        if hello.found is not None:
            self._found[rank] = hello.found
        if len(self._hellos) >= self._num_ranks:
            self.host.open(min(each.num_open for each in self._hellos.values()))
        if hello.found is not None and len(self._found) == self._num_disk_ranks:
            self._adopt()

    def _adopt(self) -> None:
        first, *others = (self._found[rank] for rank in sorted(self._found))
        everywhere = set(first).intersection(*others)
        kept = [name for name in first if name in everywhere][-self.disk.capacity :]
        room = self.disk.reserve(kept[::-1])
        assert room is not None, "the disk was empty a moment ago"
        self.disk.commit(kept)
        kept_names = set(kept)
        all_names = dict.fromkeys(name for names in self._found.values() for name in names)
        self._forget([name for name in all_names if name not in kept_names])
        self._found = dict.fromkeys(self._found, ())

    def finish(self, order_id: int, done: Done) -> tuple[Order, Done] | None:
        """Some ranks have carried out an order. When they were the last ones: the order, and what
        came of it."""
        moving = self._moving.get(order_id)
        if moving is None:
            return None
        moving.num_ranks_left -= done.num_ranks
        moving.done = moving.done.and_also(done)
        if moving.num_ranks_left > 0:
            return None
        del self._moving[order_id]
        moved: list[tuple[bytes, BlockKey]] = []
        lost: list[tuple[bytes, BlockKey]] = []
        for at, pair in enumerate(zip(moving.keys, moving.order.keys, strict=True)):
            has_moved = not moving.is_void and at not in moving.done.failed
            (moved if has_moved else lost).append(pair)
        if moving.order.move is Move.DEMOTE:
            self._end_demotion(moved, lost)
        else:
            self._end_promotion(moved, lost)
        return moving.order, moving.done

    def _end_demotion(
        self, moved: list[tuple[bytes, BlockKey]], lost: list[tuple[bytes, BlockKey]]
    ) -> None:
        self.host.release([key for key, _ in (*moved, *lost)])
        self.disk.commit([name for _, name in moved])
        self._change([key for key, _ in moved], DISK)
        self.disk.abort([name for _, name in lost])
        self._forget([name for _, name in lost])  # one rank may have it

    def _end_promotion(
        self, moved: list[tuple[bytes, BlockKey]], lost: list[tuple[bytes, BlockKey]]
    ) -> None:
        keys = [key for key, _ in moved]
        self.host.commit(keys)
        self._from_disk.update(keys)
        self._change(keys, HOST)
        self.disk.release([name for _, name in moved])
        self.host.abort([key for key, _ in lost])
        names = [name for _, name in lost]
        self._leave_disk(names)
        self.disk.lose(names)
        self.disk.release(names)
        self._forget(names)

    # -- what others should know -------------------------------------------------------------------

    def take_num_not_demoted(self) -> int:
        """Chunks that left host memory before the disk had taken them, since the last call."""
        num, self._num_not_demoted = self._num_not_demoted, 0
        return num

    def take_changes(self) -> list[Change]:
        """What came and went since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _change(self, keys: Sequence[bytes], tier: str, is_removed: bool = False) -> None:
        if keys:
            self._changes.append(Change(list(keys), tier, is_removed))

    def _leave_host(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._waiting.pop(key, None) is not None:
                self._num_not_demoted += 1
        self._from_disk.difference_update(keys)
        self._change(keys, HOST, is_removed=True)

    def _leave_disk(self, names: Sequence[bytes]) -> None:
        keys = [self._key_of.pop(name, None) for name in names]
        self._change([key for key in keys if key is not None], DISK, is_removed=True)

    def check_invariants(self) -> None:
        """Raise AssertionError where the tiers and the moves disagree."""
        self.host.check_invariants()
        self.disk.check_invariants()
        assert not self._waiting or self.has_disk, "chunks wait for a disk that is not there"
        for key in self._waiting:
            assert self.host.state(key) is ChunkState.READY, "a chunk waits that is not there"
