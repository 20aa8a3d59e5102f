"""Weight of a block by its depth: later blocks of a prompt take longer to recompute."""

from __future__ import annotations

from kvtier.index import BlockIndex
from kvtier.plan import CostModel, PrefillCost

CHANGED = 1.25
"""Policies are told again when what they were told is off by as much."""


class RecomputeWeight:
    """Tells the policies of ``index`` what the planner has measured of prefill.

    Until then, and where attention costs nothing that could be seen, all blocks are worth the same.

    block_size: tokens of a block.
    """

    def __init__(self, index: BlockIndex, costs: CostModel, block_size: int) -> None:
        self._index = index
        self._costs = costs
        self._block_size = block_size
        self._seen: PrefillCost | None = None
        self._told = 0.0

    def look(self) -> None:
        """Tell of what has changed.

        Constant time, and next to none where nothing was measured since.
        """
        cost = self._costs.recent_prefill
        if cost is None or cost is self._seen:
            return
        self._seen = cost
        at_blocks = cost.doubles_at_tokens / self._block_size
        if self._told / CHANGED <= at_blocks <= self._told * CHANGED:
            return
        self._told = at_blocks
        self._index.set_doubling(at_blocks)
