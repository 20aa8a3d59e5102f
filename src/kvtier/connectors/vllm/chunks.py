"""Which chunks of KV a tier has: a flat index, by the engine's own keys.

vLLM gives a key per chunk that names its whole prefix, and asks for one after the other; so there
is nothing that a trie would know better. The chunk that was used least recently leaves first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from kvtier.tiers.slots import SlotPool
from kvtier.types import Slot


class ChunkState(Enum):
    """What a look-up finds."""

    ABSENT = "absent"
    WRITING = "writing"
    READY = "ready"


@dataclass(slots=True)
class _Chunk:
    is_ready: bool = False
    is_lost: bool = False
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Room for new chunks: their keys, and those of the chunks that left for them."""

    keys: list[bytes]
    evicted: list[bytes]


class ChunkIndex:
    """Room for ``capacity`` chunks. Owned by one thread.

    A chunk is written once: reserved, then committed or aborted. One that is held is not evicted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: dict[bytes, _Chunk] = {}
        self._order: OrderedDict[bytes, None] = OrderedDict()  # used least recently first

    def __len__(self) -> int:
        """Chunks that are there, or will be."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def state(self, key: bytes) -> ChunkState:
        """Whether ``key`` can be loaded. Changes nothing."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.is_lost:
            return ChunkState.ABSENT
        return ChunkState.READY if chunk.is_ready else ChunkState.WRITING

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were used just now. The first ones, the beginning of a prompt, leave last."""
        for key in reversed(list(keys)):
            if key in self._order:
                self._order.move_to_end(key)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Ready chunks can't leave before ``release``."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.is_ready, "a chunk that is still being written can't be read"
            chunk.num_holders += 1

    def release(self, keys: Iterable[bytes]) -> None:
        """Undo ``hold``. Chunks that are gone meanwhile are passed over."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.num_holders:
                chunk.num_holders -= 1
                if chunk.is_lost and not chunk.num_holders:
                    self._drop(key)

    def reserve(self, keys: Collection[bytes]) -> Room | None:
        """Room for those of ``keys`` that are absent, after evicting others; None without room.

        They count as used now, and the first ones leave last; not when they are written at last.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._chunks]
        missing = len(self._chunks) + len(new) - self.capacity
        wanted = set(keys)
        leaving: list[bytes] = []
        if missing > 0:
            may_leave = (key for key in self._order if self._is_idle(key) and key not in wanted)
            leaving = [key for key, _ in zip(may_leave, range(missing), strict=False)]
            if missing > len(leaving):
                return None
        for key in leaving:
            self._drop(key)
        self._add(new)
        return Room(new, leaving)

    def commit(self, keys: Iterable[bytes]) -> None:
        """Reserved chunks are written: they can be read now, but for those that are lost."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.is_ready:
                if chunk.is_lost:
                    self._drop(key)
                else:
                    chunk.is_ready = True

    def abort(self, keys: Iterable[bytes]) -> None:
        """Reserved chunks were not written: they are absent again."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.is_ready:
                self._drop(key)

    def lose(self, keys: Iterable[bytes]) -> None:
        """Chunks can't be read after all: absent from now on; their room is free when nobody holds
        or writes them any more."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None:
                chunk.is_lost = True
                if chunk.is_ready and not chunk.num_holders:
                    self._drop(key)

    def clear(self, moving: Collection[bytes] = ()) -> None:
        """Forget every chunk, held or half written ones, too: whoever empties a cache waits for the
        copies on their way, and never tells of their end.

        moving: those whose one reader or writer is not waited for. They are absent, and keep their
        room until ``release`` or ``abort``.
        """
        for key in list(self._chunks):
            if key not in moving:
                self._drop(key)
                continue
            chunk = self._chunks[key]
            chunk.is_lost = True
            chunk.num_holders = int(chunk.is_ready)

    def _is_idle(self, key: bytes) -> bool:
        chunk = self._chunks[key]
        return chunk.is_ready and not chunk.num_holders

    def _add(self, keys: list[bytes]) -> None:
        self._chunks.update((key, _Chunk()) for key in keys)
        self._order.update((key, None) for key in reversed(keys))

    def _drop(self, key: bytes) -> None:
        del self._chunks[key], self._order[key]

    def check_invariants(self) -> None:
        """Raise AssertionError where the chunks don't add up."""
        assert len(self._chunks) <= self.capacity, "more chunks than there is room for"
        assert self._order.keys() == self._chunks.keys(), "a chunk without a place in the order"
        lost = [key for key, chunk in self._chunks.items() if chunk.is_lost and self._is_idle(key)]
        assert not lost, "a lost chunk that nobody holds keeps its room"


class HostIndex(ChunkIndex):
    """A chunk index that knows the slot of each chunk. Slots are closed at first: see ``open``."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(0)
        self._slots = SlotPool(num_slots, num_open=0)
        self._slot_of: dict[bytes, Slot] = {}

    def open(self, num_open: int) -> None:
        """The first ``num_open`` slots can be used from now on; never fewer than before."""
        if num_open > self.capacity:
            self._slots.open(num_open - self.capacity)
            self.capacity = num_open

    def slots(self, keys: Iterable[bytes]) -> list[Slot]:
        """Where chunks lie, ready or not."""
        return [self._slot_of[key] for key in keys]

    def keys_in(self, slots: Collection[Slot]) -> list[bytes]:
        """The chunks that lie in some slots. Looks at every chunk."""
        return [key for key, slot in self._slot_of.items() if slot in slots]

    def _add(self, keys: list[bytes]) -> None:
        super()._add(keys)
        slots = self._slots.allocate(len(keys))
        assert slots is not None, "there was room a moment ago"
        self._slot_of.update(zip(keys, slots, strict=True))

    def _drop(self, key: bytes) -> None:
        super()._drop(key)
        self._slots.free([self._slot_of.pop(key)])

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._slot_of.keys() == self._chunks.keys(), "a chunk without a slot"
        slots = set(self._slot_of.values())
        assert len(slots) == len(self._slot_of), "a slot holds two chunks"
        assert len(slots) + self._slots.num_free == self.capacity, "a slot is lost"
