"""Room in a tier that takes whatever comes: who leaves for it, by the policy that works on runs.

vLLM asks for room when it has a block to store, and can't be told that another one is worth more.
So what is not worth its room is a *guest*: the next to leave, for whatever comes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import Said
from kvtier.index.policies.live import LivePolicy

Names = npt.NDArray[np.uint64]
"""Names of whole prefixes, each given by its last block."""
NONE = np.zeros(0, np.uint64)
FADE = 0.99
"""Decay per call of the largest demand of guests."""


class Path:
    """A request's blocks, group by group.

    names: all of its prompt's. last: the one that came last. is_cut: one of them was not worth its
    room, so those behind it are not, either.
    """

    def __init__(self, room: GuestTier, names: Names) -> None:
        self.room = room
        self.names = names
        self.last: int | None = None
        self.is_cut = False


class GuestTier:
    """``capacity`` blocks. Owned by one thread.

    A request's own blocks leave for its later ones only where nothing else may: they are worth
    nothing without each other.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._live = LivePolicy(self.capacity)
        self._guests: dict[int, None] = {}
        self._wanted = 0.0
        self._coming: set[int] = set()

    def __len__(self) -> int:
        return self._live.num_blocks + len(self._guests)

    def is_guest(self, name: int) -> bool:
        """Whether a resident block is here for the moment only."""
        return name in self._guests

    def ask(self, paths: Sequence[Names], now_s: float) -> Path:
        """Report a request that begins, and return its path.

        paths: of each KV group the names of its blocks, in the prompt's order.
        """
        path = Path(self, np.concatenate([NONE, *paths]))
        for names in paths:
            found = self._live.asked(names, now_s)
            if self._guests:
                self._welcome(names[found:], path)
        return path

    def retain(self, names: Names, said: Said, now_s: float) -> None:
        """Somebody says something of a group's blocks of a prompt, which was asked for.

        Guests leave before all others, whatever is said.
        """
        self._live.retain(names, said, now_s)

    def _welcome(self, names: Names, path: Path) -> None:
        """Swap guests that are used again with the blocks that are worth least.

        Used are those that come next in a prompt.
        """
        used = list(takewhile(self._guests.__contains__, names.tolist()))
        others = self._live.victims(len(used), path.names) if used else []
        for name in used:
            del self._guests[name]
        self._guests.update(dict.fromkeys(others))
        self.enter(used)

    def enter(self, names: Sequence[int], behind: int | None = None) -> None:
        """These blocks are resident now.

        behind: a resident block, behind which those lie that nobody has asked for, such as those of
        an answer.
        """
        stay = [name for name in names if name not in self._coming]
        self._guests.update((name, None) for name in names if name in self._coming)
        self._coming.difference_update(names)
        if behind is not None and behind not in self._guests:
            stay.insert(0, behind)
        if stay:
            self._live.entered(np.array(stay, np.uint64))

    def leave(self, name: int) -> None:
        """This block is gone that was not told to."""
        if name in self._guests:
            del self._guests[name]
        else:
            self._live.left(np.array([name], np.uint64))

    def make(
        self, num_blocks: int, new: Sequence[int], path: Path | None, held: Collection[int]
    ) -> list[int]:
        """Blocks that leave now, ``num_blocks`` of them or as many as may.

        new: those that come for them, in their prompt's order; what of them is a guest is known
        from now on. path: of the request whose they are. held: resident blocks that stay.
        """
        kept = np.fromiter(held, np.uint64, len(held))
        own = kept if path is None else np.concatenate([kept, path.names])
        worth = 0
        if path is None or not path.is_cut:
            taken = np.zeros(len(self._guests), np.uint64)  # room that is not free
            asked = np.concatenate([taken, np.array(new, np.uint64)])
            worth = self._live.admits(asked, own) - len(taken)
        self._wanted = max(len(new) - worth, FADE * self._wanted)
        lasting = max(0, num_blocks - (len(new) - worth))
        leaving = self._guests_that_leave(
            min(lasting, len(self._guests) - math.ceil(self._wanted)), held
        )
        leaving += self._live.victims(lasting - len(leaving), own)
        worth -= lasting - len(leaving)
        leaving += self._guests_that_leave(num_blocks - len(leaving), held)
        for stay in (own, kept):
            if len(leaving) < num_blocks:
                leaving += self._live.victims(num_blocks - len(leaving), stay)
        if path is not None:
            path.is_cut |= worth < len(new)
        self._coming = set(new[max(0, worth) :])
        return leaving

    def _guests_that_leave(self, num_blocks: int, held: Collection[int]) -> list[int]:
        may = (name for name in self._guests if name not in held)
        leaving = list(islice(may, max(0, num_blocks)))
        for name in leaving:
            del self._guests[name]
        return leaving

    def check_invariants(self) -> None:
        """Raise AssertionError where more is resident than fits, or a block is counted twice."""
        self._live.check_invariants()
        assert len(self) <= self.capacity, "more is resident than fits"
