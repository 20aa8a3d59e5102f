"""Load or recompute: the cheapest way to have a prompt's KV on the device."""

from __future__ import annotations

from math import inf

from kvtier.plan.cost import Costs
from kvtier.plan.operations import Copy, Plan
from kvtier.types import DEVICE, BlockId, Match


def plan_load(
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
) -> Plan:
    """Choose how much of a matched prefix to reuse.

    For every cut c (a multiple of ``grain_blocks``) the cost is

        load(blocks < c that are not on the device) + prefill(c * block_size up to num_tokens)

    and the cheapest cut wins, the longer one where two cost the same. Blocks on their way to the
    device cost what is left of their copy, for which the line they stand in is the estimate.

    num_tokens: the prompt's length; the cut leaves at least one token to compute, for its logits.
    num_free_slots: slots of the device tier that could be had, by eviction if need be.
    num_staging_slots: the same of the tier below it, which blocks from further down pass through;
    None for any number.
    deadline_s: a load estimated to take longer is not begun.
    """
    longest = min(match.num_blocks, (num_tokens - 1) // block_size)
    pending: dict[str, int] = {}
    num_slots = num_staged = 0
    all_recompute_s = costs.prefill_s(0, num_tokens)
    best = Plan(recompute_s=all_recompute_s, all_recompute_s=all_recompute_s)
    for cut in range(1, longest + 1):
        tier, arriving = match.tiers[cut - 1], match.in_flight[cut - 1]
        if tier != DEVICE:
            pending[tier] = pending.get(tier, 0) + (0 if arriving else bytes_per_block)
            num_slots += not arriving
            num_staged += not arriving and len(costs.ways[tier]) > 1
        if cut % grain_blocks:
            continue
        load_s = costs.load_s(pending)
        if num_slots > num_free_slots:
            break
        if num_staging_slots is not None and num_staged > num_staging_slots:
            break
        if load_s == inf:
            break  # nothing moves on some way
        if deadline_s is not None and load_s > deadline_s:
            continue  # a longer copy may be faster: large copies have a better rate
        recompute_s = costs.prefill_s(cut * block_size, num_tokens)
        if load_s + recompute_s <= best.load_s + best.recompute_s:
            best = Plan((), cut, load_s, recompute_s, all_recompute_s)
    copies = _loads(match.first(best.num_reused_blocks))
    return Plan(copies, best.num_reused_blocks, best.load_s, best.recompute_s, all_recompute_s)


def _loads(match: Match) -> tuple[Copy, ...]:
    """One copy per source tier, for the blocks that are not on the device or on their way to it."""
    sources: dict[str, list[BlockId]] = {}
    for block, tier, arriving in zip(match.blocks, match.tiers, match.in_flight, strict=True):
        if tier != DEVICE and not arriving:
            sources.setdefault(tier, []).append(block)
    return tuple(Copy(src, DEVICE, tuple(blocks)) for src, blocks in sources.items())
