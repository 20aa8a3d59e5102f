"""Eviction for a tier without admission, by the learned policy.

vLLM requests slots when it has a block to store, and cannot be refused. A block that the policy
would not admit is therefore *unadmitted*: it is stored, and evicted before all other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import BlockHint
from kvtier.index.policies.live import LivePolicy

Names = npt.NDArray[np.uint64]
"""Names of whole prefixes, each given by its last block."""
NONE = np.zeros(0, np.uint64)
FADE = 0.99
"""Decay per call of the largest demand of unadmitted blocks."""


@dataclass(slots=True, eq=False)
class Path:
    """A request's blocks, group by group.

    Attributes:
        tier: the tier.
        names: names of all blocks of its prompt.
        last: name of the block that was stored last; None before the first.
        is_cut: one of its blocks was not admitted, so the blocks behind it are not, either.
    """

    tier: UnadmittedTier
    names: Names
    last: int | None = None
    is_cut: bool = False


class UnadmittedTier:
    """Resident blocks of a tier of ``capacity`` blocks, and their eviction. One thread owns it.

    A request's own blocks are evicted for its later ones only if no others can be, since a block
    has no value without the blocks before it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._live = LivePolicy(self.capacity)
        self._unadmitted: dict[int, None] = {}
        self._wanted = 0.0
        self._coming: set[int] = set()

    def __len__(self) -> int:
        return self._live.num_blocks + len(self._unadmitted)

    def is_unadmitted(self, name: int) -> bool:
        """Whether a resident block is an unadmitted block."""
        return name in self._unadmitted

    def ask(self, paths: Sequence[Names], now_s: float) -> Path:
        """Report a request that begins, and return its path.

        paths: for each KV group, the names of its blocks in prompt order.
        """
        path = Path(self, np.concatenate([NONE, *paths]))
        for names in paths:
            found = self._live.asked(names, now_s)
            if self._unadmitted:
                self._welcome(names[found:], path)
        return path

    def retain(self, names: Names, block_hint: BlockHint, now_s: float) -> None:
        """Record the retention hint of one KV group of a prompt that was reported by ``ask``.

        A hint has no effect on unadmitted blocks: they are evicted before all other blocks.
        """
        self._live.retain(names, block_hint, now_s)

    def _welcome(self, names: Names, path: Path) -> None:
        """Admit unadmitted blocks that a request uses, and make as many others unadmitted.

        names: the blocks behind the prompt's resident ones, in prompt order. The unadmitted ones
            at their beginning are used; they change places with the blocks of the least value.
        """
        used = list(takewhile(self._unadmitted.__contains__, names.tolist()))
        others = self._live.victims(len(used), path.names) if used else []
        for name in used:
            del self._unadmitted[name]
        self._unadmitted.update(dict.fromkeys(others))
        self.enter(used)

    def enter(self, names: Sequence[int], behind: int | None = None) -> None:
        """Report that blocks are resident now.

        behind: a resident block that precedes ``names`` in the prompt. It is needed for blocks that
            were not in the request, such as those of an answer.
        """
        stay = [name for name in names if name not in self._coming]
        self._unadmitted.update((name, None) for name in names if name in self._coming)
        self._coming.difference_update(names)
        if behind is not None and behind not in self._unadmitted:
            stay.insert(0, behind)
        if stay:
            self._live.entered(np.array(stay, np.uint64))

    def leave(self, name: int) -> None:
        """Report that a block is no longer resident for another reason than ``make``."""
        if name in self._unadmitted:
            del self._unadmitted[name]
        else:
            self._live.left(np.array([name], np.uint64))

    def make(
        self, num_blocks: int, new: Sequence[int], path: Path | None, held: Collection[int]
    ) -> list[int]:
        """Evict up to ``num_blocks`` blocks, and return their names.

        Args:
            num_blocks: slots that are needed.
            new: the blocks to store in them, in prompt order. Blocks that the policy does not admit
                become unadmitted blocks in ``enter``.
            path: path of their request; None if they belong to several requests or to none.
            held: resident blocks that must stay.
        """
        kept = np.fromiter(held, np.uint64, len(held))
        own = kept if path is None else np.concatenate([kept, path.names])
        worth = 0
        if path is None or not path.is_cut:
            taken = np.zeros(len(self._unadmitted), np.uint64)  # room that is not free
            asked = np.concatenate([taken, np.array(new, np.uint64)])
            worth = self._live.admits(asked, own) - len(taken)
        self._wanted = max(len(new) - worth, FADE * self._wanted)
        lasting = max(0, num_blocks - (len(new) - worth))
        leaving = self._evict_unadmitted(
            min(lasting, len(self._unadmitted) - math.ceil(self._wanted)), held
        )
        leaving += self._live.victims(lasting - len(leaving), own)
        worth -= lasting - len(leaving)
        leaving += self._evict_unadmitted(num_blocks - len(leaving), held)
        for stay in (own, kept):
            if len(leaving) < num_blocks:
                leaving += self._live.victims(num_blocks - len(leaving), stay)
        if path is not None:
            path.is_cut |= worth < len(new)
        self._coming = set(new[max(0, worth) :])
        return leaving

    def _evict_unadmitted(self, num_blocks: int, held: Collection[int]) -> list[int]:
        may = (name for name in self._unadmitted if name not in held)
        leaving = list(islice(may, max(0, num_blocks)))
        for name in leaving:
            del self._unadmitted[name]
        return leaving

    def check_invariants(self) -> None:
        """Raise AssertionError if too many blocks are resident, or a block is counted twice."""
        self._live.check_invariants()
        assert len(self) <= self.capacity, "more is resident than fits"
