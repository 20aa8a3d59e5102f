"""Stop strings, matched on text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string occurs in it.

    Together the pieces given out are the whole text, cut at the first place where a stop string
    begins, however the text was split. What may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._pending += text
        found, held = self._found(), self._held()
        if found is not None and found <= held:
            return self._cut(found)
        # A stop that began earlier may still be completed, even where a later one is complete.
        given, self._pending = self._pending[:held], self._pending[held:]
        return given

    def flush(self) -> str:
        """Return the text that was held back; the answer has ended."""
        found = self._found()
        if found is not None:
            return self._cut(found)
        given, self._pending = self._pending, ""
        return given

    def _cut(self, at: int) -> str:
        given, self._pending = self._pending[:at], ""
        self.stopped = True
        return given

    def _found(self) -> int | None:
        """Return where the first complete stop string begins."""
        places = (self._pending.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)

    def _held(self) -> int:
        """Return where the longest tail begins that a stop string continues; the end if none."""
        end = len(self._pending)
        longest = max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), end + 1))
                if self._pending.endswith(stop[:length])
            ),
            default=0,
        )
        return end - longest
