"""Blocks of a room that stay in memory for a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtier.keyed.cache import BlockLocation

if TYPE_CHECKING:
    from kvtier.node.room import NodeRoom


@dataclass(slots=True)
class Pin:
    """Blocks that are not evicted from memory before ``until_s``.

    segment_of: by key, the segment that the block lies in.
    """

    number: int
    until_s: float
    segment_of: dict[bytes, int] = field(default_factory=dict)


class Pins:
    """Pins of one room.

    A pinned block keeps its whole segment from other rooms, so pins are counted in segments.
    """

    def __init__(self, room: NodeRoom, clock: Callable[[], float]) -> None:
        self._room = room
        self._clock = clock
        self._pins: dict[int, Pin] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks; one that was pinned twice counts twice."""
        return sum(len(pin.segment_of) for pin in self._pins.values())

    @property
    def segments(self) -> set[int]:
        """Segments with a pinned block."""
        return {segment for pin in self._pins.values() for segment in pin.segment_of.values()}

    def add(self, keys: Sequence[bytes], seconds: float, most_segments: int) -> Pin:
        """Pin the first blocks of a prompt that are in memory, up to the first that is not.

        most_segments: how many segments may hold pinned blocks of this room afterwards.
        """
        self._num_made += 1
        pin = Pin(self._num_made, self._clock() + seconds)
        places = self._room.locate_all(keys)
        missing = (at for at, place in enumerate(places) if place is not BlockLocation.MEMORY)
        wanted = list(dict.fromkeys(keys[: next(missing, len(keys))]))
        if not wanted:
            return pin
        slots = self._room.hold(wanted)
        at = self._room.tier.segments_of(np.asarray(slots, np.int64)).tolist()
        staying, pinned = set(self._room.tier.segments), self.segments
        for num, (key, segment) in enumerate(zip(wanted, at, strict=True)):
            pinned.add(segment)
            if segment not in staying or len(pinned) > most_segments:
                self._room.release(wanted[num:])
                break
            pin.segment_of[key] = segment
        if pin.segment_of:
            self._pins[pin.number] = pin
        return pin

    def remove(self, number: int) -> bool:
        """End a pin. Return whether there was one of that number."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._room.release(list(pin.segment_of))
        return pin is not None

    def remove_last(self) -> bool:
        """End the pin that would last longest. Return whether there was any."""
        last = max(self._pins.values(), key=lambda pin: pin.until_s, default=None)
        return last is not None and self.remove(last.number)

    def forget(self, keys: Collection[bytes]) -> None:
        """Unpin blocks that are being deleted."""
        for pin in list(self._pins.values()):
            mine = [key for key in keys if key in pin.segment_of]
            for key in mine:
                del pin.segment_of[key]
            if mine:
                self._room.release(mine)
            if not pin.segment_of:
                del self._pins[pin.number]

    def clear(self) -> None:
        """End all pins."""
        for number in list(self._pins):
            self.remove(number)

    def expire(self) -> None:
        """End the pins whose time is over."""
        if self._pins:
            now_s = self._clock()
            for pin in list(self._pins.values()):
                if pin.until_s <= now_s:
                    self.remove(pin.number)
