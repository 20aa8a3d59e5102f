"""Load or recompute, for engines that ask before they have a place on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier.plan.cost import Costs
from kvtier.plan.explain import Decision
from kvtier.plan.planner import plan_load
from kvtier.types import DEVICE, BlockId, Match

MAX_CUTS = 64
"""Places at which a prompt may be cut: with thousands of blocks, several of them go together."""
MAX_PATIENCE_S = 10.0
"""While nothing is known about prefill yet."""

Tell = Callable[[Decision], object]
"""Told of what was decided, to explain it."""


def end_worth_loading(
    costs: Costs,
    tiers: Sequence[str],
    *,
    first: int,
    found: int,
    num_tokens: int,
    block_size: int,
    bytes_per_block: int,
    num_staging_slots: int | None,
    tell: Tell | None = None,
) -> int:
    """The token up to which loading beats computing.

    tiers: of the blocks behind the ``first`` tokens, which the device has; they end at the token
    ``found``. num_tokens: of the prompt. block_size: tokens; 0 where each block needs others beside
    it, so that all are loaded or none. num_staging_slots: see ``num_worth_loading``. tell: where
    blocks are weighed one by one.
    """
    if block_size:
        num = num_worth_loading(
            costs,
            [DEVICE] * (first // block_size) + list(tiers),
            num_tokens=num_tokens,
            block_size=block_size,
            bytes_per_block=bytes_per_block,
            num_staging_slots=num_staging_slots,
            tell=tell,
        )
        return num * block_size
    num_bytes = {tier: tiers.count(tier) * bytes_per_block for tier in dict.fromkeys(tiers)}
    return found if is_worth_loading(costs, num_bytes, first, found) else first


def num_worth_loading(
    costs: Costs,
    tiers: Sequence[str],
    *,
    num_tokens: int,
    block_size: int,
    bytes_per_block: int,
    num_staging_slots: int | None,
    tell: Tell | None = None,
) -> int:
    """Decide how many of a prompt's first blocks to load rather than compute.

    tiers: of each block, from the prompt's start; those on the device cost nothing. num_tokens: of
    the prompt. num_staging_slots: blocks that could be brought from storage; None where they need
    no room on the way, or can do without.
    """
    order = list(costs.ways)
    width = -(-len(tiers) // MAX_CUTS) or 1
    wide = [_slowest(tiers[at : at + width], order) for at in range(0, len(tiers), width)]
    match = Match(tuple(map(BlockId, range(len(wide)))), tuple(wide), (False,) * len(wide), 0)
    plan = plan_load(
        match,
        costs,
        # A hit of the whole prompt counts as one: the engine computes its last token again.
        num_tokens=max(num_tokens, len(wide) * width * block_size) + 1,
        block_size=block_size * width,
        bytes_per_block=bytes_per_block * width,
        num_free_slots=len(wide),
        num_staging_slots=None if num_staging_slots is None else num_staging_slots // width,
    )
    if tell is not None:
        tell(Decision(match, costs, plan, num_tokens, block_size * width, bytes_per_block * width))
    return min(len(tiers), plan.num_reused_blocks * width)


def _slowest(tiers: Sequence[str], order: Sequence[str]) -> str:
    """Load time of several neighbouring blocks; blocks on the device cost nothing."""
    return max(tiers, key=lambda tier: order.index(tier) if tier in order else -1)


def is_worth_loading(costs: Costs, num_bytes: Mapping[str, int], first: int, end: int) -> bool:
    """Whether loading bytes beats computing the tokens from ``first`` up to ``end``.

    Bytes are given by the tier that has them.
    """
    return costs.load_s(num_bytes) <= costs.prefill_s(first, end)


def patience_s(costs: Costs, first: int, end: int) -> float:
    """Return how long a prompt may wait for KV of tokens ``first`` to ``end``, in seconds.

    It never waits longer than computing them would take.
    """
    return min(MAX_PATIENCE_S, costs.prefill_s(first, end))
