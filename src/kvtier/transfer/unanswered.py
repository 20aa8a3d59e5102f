"""Look-ups that storage has not answered."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from kvtier.grouping import has
from kvtier.tiers import Outcome
from kvtier.types import BlockKey

MOST_UNANSWERED: Final = 1 << 16
"""Keys; of more than that nobody says that storage may have them. They are computed again."""


class Unanswered:
    """Keys of look-ups that failed.

    Storage may have found them, and count them among those that its owner knows of; so it has to be
    asked again. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._keys: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        """Record the result of a look-up; no outcomes if it failed."""
        if outcomes and not self._keys and not has(outcomes, Outcome.FAILED):
            return
        with self._lock:
            for at, key in enumerate(keys):
                outcome = outcomes[at] if outcomes else Outcome.FAILED
                if outcome is not Outcome.FAILED:
                    self._keys.discard(key)
                elif len(self._keys) < MOST_UNANSWERED:
                    self._keys.add(key)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Nobody wants these any more."""
        if self._keys:
            with self._lock:
                self._keys.difference_update(keys)
