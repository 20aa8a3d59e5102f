"""Load or recompute: the cheapest way to have a prompt's KV on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvtier.index import ALL, ReuseRule
from kvtier.plan.cost import Costs
from kvtier.plan.operations import Copy, Plan
from kvtier.types import DEVICE, BlockId, GroupMatch, Match


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """What a plan has to know of one group of layers.

    num_free_slots: slots of its device column that could be had, by eviction if need be.
    num_staging_slots: the same of the tier below, which blocks from further down pass through; None
    for any number. rule: which blocks a cut needs.
    """

    bytes_per_block: int
    num_free_slots: int
    num_staging_slots: int | None = None
    rule: ReuseRule = ALL


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
    """Choose how much of a matched prefix to reuse: ``plan_groups`` with one group."""
    return plan_groups(
        match.over_groups(),
        costs,
        [GroupRoom(bytes_per_block, num_free_slots, num_staging_slots)],
        num_tokens=num_tokens,
        block_size=block_size,
        grain_blocks=grain_blocks,
        deadline_s=deadline_s,
    )


def plan_groups(
    match: GroupMatch,
    costs: Costs,
    rooms: Sequence[GroupRoom],
    *,
    num_tokens: int,
    block_size: int,
    grain_blocks: int = 1,
    deadline_s: float | None = None,
) -> Plan:
    """Choose how much of what is cached to reuse.

    For every possible cut c (a multiple of ``grain_blocks``) the cost is

        load(blocks that c needs, of each group, that are not on the device)
        + prefill(c * block_size up to num_tokens)

    and the cheapest cut wins, the longer one where two cost the same. Blocks on their way to the
    device cost what is left of their copy, for which the line they stand in is the estimate.

    rooms: of each group of the match. num_tokens: the prompt's length; the cut leaves at least one
    token to compute, for its logits. deadline_s: a load estimated to take longer is not begun.
    Cost: O(blocks x groups): from one cut to the next a block enters or leaves what is needed once.
    """
    longest = (num_tokens - 1) // block_size
    pending = _Pending()
    needs = [_Need(pending, match, group, costs, room) for group, room in enumerate(rooms)]
    best, best_load_s = 0, 0.0
    all_recompute_s = best_recompute_s = costs.prefill_s(0, num_tokens)
    for cut in match.cuts:
        if cut > longest:
            break
        if cut % grain_blocks:
            continue
        fits = True
        for need in needs:
            fits &= need.move_to(cut)
        if not fits:
            continue
        load_s = costs.load_s(pending.num_bytes)
        if load_s == inf:
            continue  # nothing moves on some way
        if deadline_s is not None and load_s > deadline_s:
            continue  # a longer copy may be faster: large copies have a better rate
        recompute_s = costs.prefill_s(cut * block_size, num_tokens)
        if load_s + recompute_s <= best_load_s + best_recompute_s:
            best, best_load_s, best_recompute_s = cut, load_s, recompute_s
    copies = [copy for group, room in enumerate(rooms) for copy in _loads(match, group, room, best)]
    return Plan(tuple(copies), best, best_load_s, best_recompute_s, all_recompute_s)


class _Pending:
    """Of all groups, what a cut needs from other tiers than the device.

    num_bytes: to be copied, per tier that blocks come from; a tier is named with 0 bytes where all
    of them are on their way. num_blocks: those on their way included.
    """

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}
        self.num_blocks: dict[str, int] = {}


class _Need:
    """What a cut needs of one group, kept up to date from one cut to the next."""

    def __init__(
        self, pending: _Pending, match: GroupMatch, group: int, costs: Costs, room: GroupRoom
    ) -> None:
        self._num_bytes, self._num_blocks = pending.num_bytes, pending.num_blocks
        self._tiers, self._in_flight = match.tiers[group], match.in_flight[group]
        self._is_staged = {tier: len(ways) > 1 for tier, ways in costs.ways.items()}
        self._room, self._num_last = room, room.rule.num_last
        self._start = self._end = 0
        self._num_slots = self._num_staged = 0

    def move_to(self, cut: int) -> bool:
        """Make it what ``cut`` needs, which lies behind the one before. Whether there is room for
        it."""
        for at in range(self._end, cut):
            tier = self._tiers[at]
            if tier != DEVICE and tier is not None:
                self._count(at, tier, +1)
        self._end = cut
        if self._num_last is not None:
            for at in range(self._start, cut - self._num_last):
                tier = self._tiers[at]
                if tier != DEVICE and tier is not None:
                    self._count(at, tier, -1)
            self._start = max(0, cut - self._num_last)
        most_staged = self._room.num_staging_slots
        if most_staged is not None and self._num_staged > most_staged:
            return False
        return self._num_slots <= self._room.num_free_slots

    def _count(self, at: int, tier: str, sign: int) -> None:
        num_blocks = self._num_blocks[tier] = self._num_blocks.get(tier, 0) + sign
        num_bytes = self._num_bytes.get(tier, 0)
        if not self._in_flight[at]:
            num_bytes += sign * self._room.bytes_per_block
            self._num_slots += sign
            if self._is_staged[tier]:
                self._num_staged += sign
        self._num_bytes[tier] = num_bytes
        if not num_blocks:
            del self._num_bytes[tier]


def _loads(match: GroupMatch, group: int, room: GroupRoom, cut: int) -> list[Copy]:
    """One copy per source tier, for the blocks that are not on the device or on their way to it."""
    sources: dict[str, list[BlockId]] = {}
    tiers, in_flight = match.tiers[group], match.in_flight[group]
    for at in room.rule.needed(cut):
        tier = tiers[at]
        if tier is not None and tier != DEVICE and not in_flight[at]:
            sources.setdefault(tier, []).append(match.blocks[at])
    return [Copy(src, DEVICE, tuple(blocks), group) for src, blocks in sources.items()]
