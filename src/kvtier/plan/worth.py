"""Load or recompute, for engines that ask before they have device slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtier.core.types import BlockId, Match
from kvtier.plan.cost import Costs
from kvtier.plan.explain import Decision
from kvtier.plan.needs import GroupCapacity
from kvtier.plan.planner import plan_groups

MAX_CUTS = 64
"""Maximum number of cuts considered: of a longer prompt, several blocks are treated as one."""
MAX_PATIENCE_S = 10.0
"""Limit of ``patience_s``, also while the prefill cost is unknown."""

Tell = Callable[[Decision], object]
"""Receives a decision, to explain it."""


def weigh(
    match: Match,
    costs: Costs,
    *,
    num_tokens: int,
    block_size: int,
    bytes_per_block: int,
    num_free_slots: int,
    num_staging_slots: int | None = None,
    grain_blocks: int = 1,
    deadline_s: float | None = None,
    is_weighed: bool = True,
    from_both_ends: bool = False,
) -> Decision:
    """Return the cheapest cut of a prefix of one group, with all that it depends on.

    Arguments: see ``plan_groups`` and ``GroupCapacity``. costs: trials of copies of a grain's size
    are considered, too. is_weighed: see ``Decision``.
    """
    costs = costs.with_trials_of(bytes_per_block * grain_blocks)
    plan = plan_groups(
        match.over_groups(),
        costs,
        [GroupCapacity(bytes_per_block, num_free_slots, num_staging_slots)],
        num_tokens=num_tokens,
        block_size=block_size,
        grain_blocks=grain_blocks,
        deadline_s=deadline_s,
        from_both_ends=from_both_ends,
    )
    return Decision(
        match, costs, plan, num_tokens, block_size, bytes_per_block, grain_blocks, is_weighed
    )


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
    """Return how many of a prompt's first blocks to load rather than compute.

    tiers: of each block, from the prompt's start; those on the device cost nothing.
    num_tokens: length of the prompt.
    num_staging_slots: blocks that can be read from storage now; None if they need no room in the
    staging tier.
    """
    order = list(costs.ways)
    width = -(-len(tiers) // MAX_CUTS) or 1
    wide = [_slowest(tiers[at : at + width], order) for at in range(0, len(tiers), width)]
    match = Match(tuple(map(BlockId, range(len(wide)))), tuple(wide), (False,) * len(wide), 0)
    decision = weigh(
        match,
        costs,
        # A full hit is allowed: the engine itself recomputes the last token.
        num_tokens=max(num_tokens, len(wide) * width * block_size) + 1,
        block_size=block_size * width,
        bytes_per_block=bytes_per_block * width,
        num_free_slots=len(wide),
        num_staging_slots=None if num_staging_slots is None else num_staging_slots // width,
    )
    if tell is not None:
        tell(replace(decision, num_tokens=num_tokens))
    return min(len(tiers), decision.plan.num_reused_blocks * width)


def _slowest(tiers: Sequence[str], order: Sequence[str]) -> str:
    """Return the slowest of the tiers of neighbouring blocks; the device is the fastest."""
    return max(tiers, key=lambda tier: order.index(tier) if tier in order else -1)


def is_worth_loading(costs: Costs, num_bytes: Mapping[str, int], first: int, end: int) -> bool:
    """Whether loading is faster than computing the tokens from ``first`` up to ``end``.

    num_bytes: per source tier.
    """
    costs = costs.with_trials_of(sum(num_bytes.values()))
    return costs.load_s(num_bytes) <= costs.prefill_s(first, end)


def patience_s(costs: Costs, first: int, end: int) -> float:
    """Return how long a prompt may wait for KV of tokens ``first`` to ``end``, in seconds.

    At most as long as computing them would take.
    """
    return min(MAX_PATIENCE_S, costs.prefill_s(first, end))
