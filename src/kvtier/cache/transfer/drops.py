"""Debts of storage: drops that it has yet to carry out, and look-ups that it has not answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final

from kvtier.core.grouping import has
from kvtier.core.types import BlockKey
from kvtier.tiers import Outcome, StorageTier

MAX_OWED: Final = 1 << 16
"""Number of keys (at most 10 MiB) from which on no new blocks are written to the tier."""
PIECE_KEYS: Final = 1 << 16
"""Keys dropped in one call; a failed call is repeated."""
MAX_UNANSWERED: Final = 1 << 16
"""Maximum number of keys. Keys beyond it are not retried: their blocks are recomputed."""


class OwedDrops:
    """Keys that ``storage`` still has to drop. Thread-safe.

    While its drop is pending, a key is not found, not read and not written again; otherwise the
    drop would remove the new block.

    The number of keys is bounded, and none is forgotten: a tier with ``MAX_OWED`` pending drops is
    full and gets no writes. Further keys can only be those of blocks that it already has.
    """

    def __init__(self, storage: StorageTier) -> None:
        self._storage = storage
        self._lock = Lock()
        self._owed: OrderedDict[BlockKey, bool] = OrderedDict()  # whether a drop is permanent
        self._sending: dict[BlockKey, bool] = {}

    def __len__(self) -> int:
        return len(self._owed) + len(self._sending)

    @property
    def is_full(self) -> bool:
        """Whether writes to the tier must be refused."""
        return len(self) >= MAX_OWED

    def add(self, keys: Sequence[BlockKey], for_good: bool) -> None:
        """Add keys that storage has to drop."""
        with self._lock:
            for key in keys:
                self._owed[key] = for_good or self._owed.get(key, False)

    def places(self, keys: Sequence[BlockKey]) -> frozenset[int]:
        """Return the positions of the keys whose drop is pending."""
        if not len(self):
            return frozenset()
        with self._lock:
            return frozenset(
                at for at, key in enumerate(keys) if key in self._owed or key in self._sending
            )

    def left_out(self, keys: Sequence[BlockKey], outcomes: list[Outcome]) -> list[Outcome]:
        """Return a look-up's outcomes, with the keys to be dropped as absent."""
        owed = self.places(keys)
        if not owed:
            return outcomes
        return [Outcome.ABSENT if at in owed else outcome for at, outcome in enumerate(outcomes)]

    def send(self) -> None:
        """Make storage drop all pending keys; an exception leaves the rest pending.

        Only one thread may call this at a time.
        """
        while self._take():
            try:
                keys, for_good = list(self._sending), next(iter(self._sending.values()))
                self._storage.drop(keys, for_good)
            except BaseException:
                self._put_back()
                raise
            with self._lock:
                self._sending.clear()

    def _take(self) -> bool:
        """Take the next keys that go in one call, in order. Return False if there are none."""
        with self._lock:
            while self._owed and len(self._sending) < PIECE_KEYS:
                key, for_good = self._owed.popitem(last=False)
                if self._sending and for_good != next(iter(self._sending.values())):
                    self._owed[key] = for_good
                    self._owed.move_to_end(key, last=False)
                    break
                self._sending[key] = for_good
            return bool(self._sending)

    def _put_back(self) -> None:
        with self._lock:
            for key, for_good in self._sending.items():
                self._owed[key] = for_good or self._owed.get(key, False)
            self._sending.clear()


class Unanswered:
    """Keys of look-ups that failed. Thread-safe.

    Storage may have found these blocks and may count them as known to the owner, so they have to be
    looked up again.
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
                elif len(self._keys) < MAX_UNANSWERED:
                    self._keys.add(key)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Discard keys that are no longer needed."""
        if self._keys:
            with self._lock:
                self._keys.difference_update(keys)
