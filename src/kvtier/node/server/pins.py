"""Blocks of a partition that stay in memory for a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtier.cache.block_cache import BlockState
from kvtier.control.contract import ControlError

if TYPE_CHECKING:
    from kvtier.node.server.partition import Partition

MAX_PINS = 1024
"""Most pins of a partition."""


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks that are not evicted from memory before ``until_s``.

    segment_of: by key, the segment that the block lies in.
    """

    number: int
    until_s: float
    segment_of: dict[bytes, int] = field(default_factory=dict)


class Pins:
    """Pins of one partition, ``MAX_PINS`` at most.

    A pinned block keeps its whole segment from other partitions, so pins are counted in segments.

    Attributes:
        num_blocks: number of pinned blocks; one that was pinned twice counts twice.
    """

    def __init__(self, partition: Partition, clock: Callable[[], float]) -> None:
        self._partition = partition
        self._clock = clock
        self._pins: dict[int, Pin] = {}
        self._of_key: dict[bytes, list[Pin]] = {}
        self._in_segment: Counter[int] = Counter()  # pinned blocks by segment
        self._num_made = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def segments(self) -> AbstractSet[int]:
        """Segments with a pinned block."""
        return self._in_segment.keys()

    def add(self, keys: Sequence[bytes], seconds: float, most_segments: int) -> Pin:
        """Pin the first blocks of a prompt that are in memory, up to the first that is not.

        most_segments: how many segments may hold pinned blocks of this partition afterwards.

        Raises ``ControlError`` if the partition has too many pins.
        """
        if len(self._pins) >= MAX_PINS:
            raise ControlError(
                f"room {self._partition.key.name} has {MAX_PINS} pins already; end some of them "
                "with --end, or wait until their time is over"
            )
        self._num_made += 1
        pin = Pin(self._num_made, self._clock() + seconds)
        found = self._partition.locate(keys).codes
        num_ready = len(found) - len(found.lstrip(bytes([BlockState.MEMORY])))
        wanted = list(dict.fromkeys(keys[:num_ready]))
        if not wanted:
            return pin
        slots = self._partition.hold(wanted).slots
        at = self._partition.tier.segments_of(np.asarray(slots, np.int64)).tolist()
        staying, pinned = set(self._partition.tier.segments), set(self.segments)
        for num, (key, segment) in enumerate(zip(wanted, at, strict=True)):
            pinned.add(segment)
            if segment not in staying or len(pinned) > most_segments:
                self._partition.cache.release(wanted[num:])
                break
            pin.segment_of[key] = segment
            self._of_key.setdefault(key, []).append(pin)
        if pin.segment_of:
            self._pins[pin.number] = pin
            self._in_segment.update(pin.segment_of.values())
            self.num_blocks += len(pin.segment_of)
        return pin

    def _leave(self, pin: Pin, keys: Sequence[bytes]) -> None:
        """Unpin some blocks of a pin, and end it with the last one."""
        for key in keys:
            segment = pin.segment_of.pop(key)
            self._in_segment[segment] -= 1
            if not self._in_segment[segment]:
                del self._in_segment[segment]
            self._of_key[key].remove(pin)
            if not self._of_key[key]:
                del self._of_key[key]
        self.num_blocks -= len(keys)
        self._partition.cache.release(keys)
        if not pin.segment_of:
            del self._pins[pin.number]

    def remove(self, number: int) -> bool:
        """End a pin. Return whether there was one of that number."""
        pin = self._pins.get(number)
        if pin is not None:
            self._leave(pin, list(pin.segment_of))
        return pin is not None

    def remove_last(self) -> bool:
        """End the pin that would last longest. Return whether there was any."""
        last = max(self._pins.values(), key=lambda pin: pin.until_s, default=None)
        return last is not None and self.remove(last.number)

    def forget(self, keys: Collection[bytes]) -> None:
        """Unpin blocks that are being deleted."""
        for key in keys if self._pins else ():
            for pin in list(self._of_key.get(key, ())):
                self._leave(pin, [key])

    def clear(self) -> None:
        """End all pins."""
        for number in list(self._pins):
            self.remove(number)

    def expire(self) -> None:
        """End expired pins."""
        if self._pins:
            now_s = self._clock()
            for pin in list(self._pins.values()):
                if pin.until_s <= now_s:
                    self.remove(pin.number)
