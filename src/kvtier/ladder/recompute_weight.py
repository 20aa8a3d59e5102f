"""Weight of a block by its depth: later blocks of a prompt take longer to recompute."""

from __future__ import annotations

from kvtier.index import BlockIndex
from kvtier.plan import CostModel, PrefillCost

CHANGED = 1.25
"""Factor by which the cost must change before the policies are told again."""


class RecomputeWeight:
    """Tells the policies of ``index`` how the cost of recomputing a block grows with its depth.

    The planner measures the cost. Until it has, or if the cost does not grow, all blocks weigh the
    same.

    block_size: tokens per block.
    """

    def __init__(self, index: BlockIndex, costs: CostModel, block_size: int) -> None:
        self._index = index
        self._costs = costs
        self._block_size = block_size
        self._seen: PrefillCost | None = None
        self._told = 0.0

    def look(self) -> None:
        """Tell the policies if the measured cost has changed. Constant time."""
        cost = self._costs.recent_prefill
        if cost is None or cost is self._seen:
            return
        self._seen = cost
        at_blocks = cost.doubles_at_tokens / self._block_size
        if self._told / CHANGED <= at_blocks <= self._told * CHANGED:
            return
        self._told = at_blocks
        self._index.set_recompute_slope(at_blocks)
