"""In the deciding process: the keys that all ranks recovered, reported piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cache.transfer.ranks.digests import (
    Keys,
    as_keys,
    buckets_of,
    differing,
    keys_in,
    num_buckets_for,
)
from kvtier.cache.transfer.ranks.messages import RecoveredBlocks, RecoveredKeys, Verb
from kvtier.core.hot import KeyTable
from kvtier.core.types import BlockKey

KEYS_PER_REPORT: Final = 1 << 15
"""1 MiB of keys from the first rank and half as much from all others: processed in milliseconds."""
ERASED_PER_STEP: Final = 1 << 10
DOUBTED_PER_STEP: Final = 1 << 13
"""Keys examined per step. Most keys of a bucket that differs are nevertheless on all ranks."""


class Ask(Protocol):
    """Sends an order about one tier to ranks. Arguments: see the fields of ``RankOrder``."""

    def __call__(
        self,
        verb: Verb,
        num: int,
        ranks: tuple[int, ...] = (),
        buckets: tuple[int, bytes] | None = None,
    ) -> object: ...


class Adoption:
    """Adoption of recovered blocks of one storage tier.

    A block counts as recovered only if all ranks have it.

        all ranks report how many keys they have    few: and which ones, at once
        DIGEST to all                               digests of buckets of keys
        LIST to the first rank                      all its keys: those in buckets that are equal on
                                                    all ranks are everywhere, and can be found at
                                                        once
        LIST to the others                          their keys in buckets that are not equal
        ERASE                                       keys that not all of them reported

    Keys that are written or dropped meanwhile are ``touch``ed: earlier reports of them are
    outdated, so they are neither found nor erased.

    ask: sends an order to ranks.
    """

    def __init__(self, num_ranks: int, ask: Ask) -> None:
        self._num_ranks = num_ranks
        self._ask = ask
        self._hellos: dict[int, RecoveredBlocks] = {}
        self._ranks_of: KeyTable = _table()  # number of ranks by key
        self._num_found = 0
        self._touched: KeyTable = _table()
        self._digests: dict[int, bytes] = {}
        self._differs: npt.NDArray[np.bool_] = np.zeros(1, bool)
        self._awaited: set[int] = set()
        self._doubtful: list[Keys] = []  # reported by some ranks, possibly by all
        self._is_over = num_ranks == 0

    @property
    def has_heard_all(self) -> bool:
        """Whether every rank has sent its hello."""
        return len(self._hellos) >= self._num_ranks

    @property
    def is_complete(self) -> bool:
        """Whether it is known for every key if all ranks have it."""
        return self._is_over

    @property
    def num_unindexed(self) -> int:
        """Keys that all ranks are known to have and that no look-up has found yet."""
        return self._num_found

    # -- reports of ranks ---------------------------------------------------------------------

    def hello(self, rank: int, found: RecoveredBlocks) -> None:
        """Record how many blocks a rank recovered. Only its first call counts."""
        if rank in self._hellos:
            return
        self._hellos[rank] = found
        if not self.has_heard_all or self._is_over:
            return
        if all(hello.keys is not None for hello in self._hellos.values()):
            for hello in self._hellos.values():
                self._count(as_keys(hello.keys or b""))
            self._end()
        elif self._num_ranks == 1:
            self._list()
        else:
            num_keys = max(hello.num_keys for hello in self._hellos.values())
            self._awaited = set(self._hellos)
            self._ask(Verb.DIGEST, num=num_buckets_for(num_keys))
        # The keys are not needed any more.
        self._hellos = {rank: RecoveredBlocks(each.num_keys) for rank, each in self._hellos.items()}

    def hear(self, piece: RecoveredKeys) -> None:
        """Handle a rank's answer; answers of one rank come in order."""
        if self._is_over or piece.rank not in self._awaited:
            return
        if piece.digests:
            self._digests[piece.rank] = piece.digests
            if self._digests.keys() == self._awaited:
                self._compare()
            return
        keys = as_keys(piece.keys)
        if piece.rank == min(self._hellos):
            is_doubtful = self._differs[buckets_of(keys, len(self._differs))]
            self._found_everywhere(keys[~is_doubtful])
            keys = keys[is_doubtful]
        self._count(keys)
        if piece.is_last:
            self._awaited.discard(piece.rank)
            if not self._awaited:
                self._end()

    def _compare(self) -> None:
        first, *others = self._digests.values()
        self._differs = np.zeros(len(differing(first, first)), bool)
        for other in others:
            self._differs |= differing(first, other)
        self._digests.clear()
        self._list()

    def _list(self) -> None:
        first, *others = sorted(self._hellos)
        self._awaited = {first}
        self._ask(Verb.LIST, ranks=(first,), num=KEYS_PER_REPORT)
        if self._differs.any():
            self._awaited.update(others)
            bits = np.packbits(self._differs, bitorder="little").tobytes()
            self._ask(
                Verb.LIST,
                ranks=tuple(others),
                num=max(1, KEYS_PER_REPORT // (2 * len(others))),
                buckets=(len(self._differs), bits),
            )

    # -- keys --------------------------------------------------------------------------------------

    def _untouched(self, keys: Keys) -> Keys:
        if not len(self._touched) or not len(keys):
            return np.ascontiguousarray(keys)
        keys = np.ascontiguousarray(keys)
        return np.ascontiguousarray(keys[self._touched.find(keys) < 0])

    def _found_everywhere(self, keys: Keys) -> None:
        keys = self._untouched(keys)
        before = len(self._ranks_of)
        self._ranks_of.put(keys, np.full(len(keys), self._num_ranks))
        self._num_found += len(self._ranks_of) - before

    def _count(self, keys: Keys) -> None:
        """Count one more rank that has these keys."""
        keys = self._untouched(keys)
        if not len(keys):
            return
        ranks = self._ranks_of.find(keys)
        self._doubtful.append(np.ascontiguousarray(keys[ranks < 0]))
        ranks = np.maximum(ranks, 0) + 1
        self._ranks_of.put(keys, ranks)
        self._num_found += int((ranks == self._num_ranks).sum())

    def _take_out(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Remove keys. Return bool [n]: whether all ranks had the key."""
        ranks = self._ranks_of.find(keys)
        known = np.flatnonzero(ranks >= 0)
        self._ranks_of.remove(np.ascontiguousarray(keys[known]), ranks[known])
        is_there = np.asarray(ranks == self._num_ranks)
        self._num_found -= int(is_there.sum())
        return is_there

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return, per key, whether all ranks are known to have it. Each key is found once."""
        if not self._num_found:
            return [False] * len(keys)
        is_there = self._peek(wanted := as_keys(b"".join(keys)))
        self._take_out(np.unique(wanted[is_there]))
        return [bool(each) for each in is_there]

    def _peek(self, keys: Keys) -> npt.NDArray[np.bool_]:
        return np.asarray(self._ranks_of.find(keys) == self._num_ranks)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Discard what ranks recovered of these keys: they are written or dropped from now on."""
        if not keys or (self._is_over and not len(self._ranks_of)):
            return
        touched = np.unique(as_keys(b"".join(keys)))
        self._take_out(touched)
        if not self._is_over:
            self._touched.put(touched, np.zeros(len(touched), np.int64))

    def _end(self) -> None:
        self._is_over = True
        self._touched = _table()

    def forget(self) -> None:
        """Discard all recovered keys, including keys that ranks have not reported yet."""
        self._ranks_of, self._num_found = _table(), 0
        self._doubtful.clear()
        self._awaited.clear()
        self._end()

    @property
    def has_to_erase(self) -> bool:
        """Whether ``take_erased`` may have more."""
        return self._is_over and bool(self._doubtful)

    def take_erased(self) -> list[BlockKey]:
        """Return some keys that not all ranks have, to be dropped permanently.

        Empty until ``is_complete``.
        """
        erased: list[BlockKey] = []
        left = DOUBTED_PER_STEP
        while self._is_over and self._doubtful and left and len(erased) < ERASED_PER_STEP:
            keys, rest = np.split(self._doubtful.pop(), [min(left, ERASED_PER_STEP - len(erased))])
            if len(rest):
                self._doubtful.append(rest)
            left -= len(keys)
            ranks = self._ranks_of.find(np.ascontiguousarray(keys))
            keys = np.ascontiguousarray(keys[(ranks > 0) & (ranks < self._num_ranks)])
            self._take_out(keys)
            erased += keys_in(keys.tobytes())
        return erased


def _table() -> KeyTable:
    return KeyTable(as_keys(b""), np.zeros(0, np.int64))
