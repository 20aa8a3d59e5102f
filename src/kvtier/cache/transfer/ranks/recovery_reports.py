"""In a rank: reports the keys that its storage recovered, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvtier.cache.transfer.ranks.digests import (
    MAX_BUCKETS,
    Keys,
    Uint64s,
    buckets_of,
    digests_of,
    fold,
    keys_in,
)
from kvtier.cache.transfer.ranks.messages import RankOrder, RecoveredBlocks, RecoveredKeys, Verb
from kvtier.core.types import BlockKey
from kvtier.tiers import KeptKeys

FEW_KEYS: Final = 1024
"""Up to this many keys are sent with the first report, without a request."""
PLACES_PER_PIECE: Final = 1 << 16
"""Entries examined at a time: milliseconds."""
CLEARED_PER_STEP: Final = 1 << 12


class Telling:
    """Reports of the recovered keys of one storage tier of this rank.

    tier: the storage tier.
    rank: number of this rank.
    kept: the recovered keys.
    num_ranks: ranks that have such storage. If there are several, digests are computed at once.
    """

    def __init__(self, tier: str, rank: int, kept: KeptKeys, num_ranks: int) -> None:
        self._tier = tier
        self._rank = rank
        self._kept = kept
        self._digests: Uint64s | None = None
        if num_ranks > 1 and kept.num_keys > FEW_KEYS:
            self._digests = digests_of(self._all())
        self._orders: list[RankOrder] = []
        self._at = 0
        self._num_cleared: int | None = None

    def _all(self) -> Iterator[Keys]:
        for start in range(0, self._kept.num_places, PLACES_PER_PIECE):
            yield self._kept.at(start, start + PLACES_PER_PIECE)

    def hello(self) -> RecoveredBlocks:
        """Return the first report."""
        num_keys = self._kept.num_keys
        if num_keys > FEW_KEYS:
            return RecoveredBlocks(num_keys, None)
        return RecoveredBlocks(num_keys, self._kept.in_order(0, num_keys).tobytes())

    def begin(self, order: RankOrder) -> None:
        """Begin to answer ``DIGEST`` or ``LIST`` if it is for this rank, or begin to ``CLEAR``.

        ``CLEAR`` cancels all answers.
        """
        if order.verb is Verb.CLEAR:
            self._orders.clear()
            self._num_cleared = 0
        elif not order.ranks or self._rank in order.ranks:
            self._orders.append(order)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to report, or to clear."""
        return bool(self._orders) or self.is_clearing

    # -- reports -----------------------------------------------------------------------------------

    def take(self) -> RecoveredKeys | None:
        """Return the next report, or None."""
        if not self._orders:
            return None
        order = self._orders[0]
        if order.verb is Verb.DIGEST:
            del self._orders[0]
            if self._digests is None:
                self._digests = digests_of(self._all())
            digests = fold(self._digests, order.num)
            self._digests = None
            return RecoveredKeys(self._rank, self._tier, digests=digests)
        keys, is_last = self._next(order)
        if is_last:
            del self._orders[0]
            self._at = 0
        return RecoveredKeys(self._rank, self._tier, keys=keys.tobytes(), is_last=is_last)

    def _next(self, order: RankOrder) -> tuple[Keys, bool]:
        if order.buckets is not None:
            return self._next_of_buckets(order.num, *order.buckets)
        # Keys that would be evicted last come first: others may be evicted before their turn.
        end = self._kept.num_keys - self._at
        start = max(0, end - order.num)
        self._at += end - start
        return self._kept.in_order(start, end), start == 0

    def _next_of_buckets(self, num: int, num_buckets: int, bits: bytes) -> tuple[Keys, bool]:
        """Examine one piece of all keys; about ``num`` of them at most are in the buckets."""
        packed = np.frombuffer(bits, np.uint8)
        is_wanted = np.unpackbits(packed, count=num_buckets, bitorder="little").astype(bool)
        share = max(int(is_wanted.sum()) / num_buckets, 1 / MAX_BUCKETS)
        end = self._at + min(PLACES_PER_PIECE, max(1, int(num / share)))
        keys = self._kept.at(self._at, end)
        self._at = end
        return keys[is_wanted[buckets_of(keys, num_buckets)]], end >= self._kept.num_places

    # -- clearing ----------------------------------------------------------------------------------

    @property
    def is_clearing(self) -> bool:
        """Whether ``take_cleared`` has more."""
        return self._num_cleared is not None

    def take_cleared(self) -> list[BlockKey]:
        """Return the next keys to be dropped permanently."""
        if self._num_cleared is None:
            return []
        end = self._num_cleared + CLEARED_PER_STEP
        keys = self._kept.in_order(self._num_cleared, end).tobytes()
        self._num_cleared = end if end < self._kept.num_keys else None
        return keys_in(keys)
