"""Which chunk of KV is in which slot of the host tier: a flat index, by the engine's own keys.

vLLM gives a key per chunk that names its whole prefix, and asks for one after the other; so there
is nothing that a trie would know better. The chunk that was used least recently leaves first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
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
    slot: Slot
    is_ready: bool = False
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots for new chunks, and the chunks that left for them."""

    keys: list[bytes]
    slots: list[Slot]
    evicted: list[bytes]


class ChunkIndex:
    """``num_slots`` slots. Owned by one thread.

    A chunk is written once: reserved, then committed or aborted. One that is held is not evicted.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = SlotPool(num_slots)
        self._chunks: dict[bytes, _Chunk] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # ready, held by nobody; oldest first

    @property
    def num_used(self) -> int:
        """Slots that hold a chunk, or will."""
        return len(self._chunks)

    def state(self, key: bytes) -> ChunkState:
        """Whether ``key`` can be loaded. Changes nothing."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return ChunkState.ABSENT
        return ChunkState.READY if chunk.is_ready else ChunkState.WRITING

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were used just now. The first ones, the beginning of a prompt, leave last."""
        for key in reversed(list(keys)):
            if key in self._idle:
                self._idle.move_to_end(key)

    def hold(self, keys: Iterable[bytes]) -> list[Slot]:
        """Where ready chunks lie; they can't leave before ``release``."""
        slots = []
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.is_ready, "a chunk that is still being written can't be read"
            chunk.num_holders += 1
            self._idle.pop(key, None)
            slots.append(chunk.slot)
        return slots

    def release(self, keys: Iterable[bytes]) -> None:
        """Undo ``hold``. Chunks that were lost meanwhile are passed over."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.num_holders:
                chunk.num_holders -= 1
                if not chunk.num_holders:
                    self._idle[key] = None

    def reserve(self, keys: Collection[bytes]) -> Reservation | None:
        """Slots for those of ``keys`` that are absent, after evicting others; None without room."""
        new = [key for key in dict.fromkeys(keys) if key not in self._chunks]
        missing = len(new) - self._slots.num_free
        wanted = set(keys)
        leaving = [key for key in self._idle if key not in wanted][: max(0, missing)]
        if missing > len(leaving):
            return None
        for key in leaving:
            self._drop(key)
        slots = self._slots.allocate(len(new))
        assert slots is not None, "there was room a moment ago"
        self._chunks.update((key, _Chunk(slot)) for key, slot in zip(new, slots, strict=True))
        return Reservation(new, slots, leaving)

    def commit(self, keys: Iterable[bytes]) -> None:
        """Reserved chunks are written: they can be read now."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.is_ready:
                chunk.is_ready = True
                self._idle[key] = None

    def abort(self, keys: Iterable[bytes]) -> None:
        """Reserved chunks were not written: they are absent again."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.is_ready:
                self._drop(key)

    def clear(self) -> None:
        """Forget every chunk, held or half written ones, too: whoever empties a cache waits for the
        copies on their way, and never tells of their end."""
        for key in list(self._chunks):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._idle.pop(key, None)
        self._slots.free([self._chunks.pop(key).slot])

    def check_invariants(self) -> None:
        """Raise AssertionError where slots and chunks don't add up."""
        slots = [chunk.slot for chunk in self._chunks.values()]
        assert len(set(slots)) == len(slots), "a slot holds two chunks"
        assert len(slots) + self._slots.num_free == self.num_slots, "a slot is lost"
        idle = {
            key for key, chunk in self._chunks.items() if chunk.is_ready and not chunk.num_holders
        }
        assert idle == set(self._idle), "what may leave is not what nobody holds"
