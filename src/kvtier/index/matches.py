"""Reusable part of a path through the trie, for one or several groups of layers.

The residencies of a node are those of the first group, fastest tier first, then those of the second
group, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.index.groups import ReuseRule
from kvtier.index.residency import State
from kvtier.index.trie import Node
from kvtier.types import BlockId, GroupMatch, Match


def find_prefix(nodes: Iterable[Node], tiers: Sequence[str], num_asked: int) -> Match:
    """Return the blocks before the first one that is not ready in any tier. For one group.

    nodes: known nodes of the prompt, from its first block on.
    tiers: names of the tiers, fastest first.
    num_asked: number of blocks of the prompt.
    """
    blocks: list[BlockId] = []
    found: list[str] = []
    in_flight: list[bool] = []
    for node in nodes:
        tier = _fastest(node, tiers, 0)
        if tier is None:
            break
        blocks.append(node.block)
        found.append(tier)
        in_flight.append(node.residencies[0].state is State.WRITING)
    return Match(tuple(blocks), tuple(found), tuple(in_flight), num_asked)


def find_cuts(
    nodes: Iterable[Node], tiers: Sequence[str], rules: Sequence[ReuseRule], num_asked: int
) -> GroupMatch:
    """Return the cuts for which every group has the needed blocks, and the blocks before the last.

    rules: rule of each group. For the other parameters see ``find_prefix``.
    """
    blocks: list[BlockId] = []
    places: list[list[str | None]] = [[] for _ in rules]
    in_flight: list[list[bool]] = [[] for _ in rules]
    runs = [0] * len(rules)  # per group: length of the run of ready blocks that ends here
    cuts: list[int] = []
    for cut, node in enumerate(nodes, start=1):
        found = [_fastest(node, tiers, group) for group in range(len(rules))]
        if any(f is None and r.needs_all for f, r in zip(found, rules, strict=True)):
            break
        blocks.append(node.block)
        for group, tier in enumerate(found):
            first = node.residencies[group * len(tiers)]
            runs[group] = 0 if tier is None else runs[group] + 1
            places[group].append(tier)
            in_flight[group].append(tier is not None and first.state is State.WRITING)
        if all(n >= rule.num_needed(cut) for n, rule in zip(runs, rules, strict=True)):
            cuts.append(cut)
    end = cuts[-1] if cuts else 0
    return GroupMatch(
        tuple(blocks[:end]),
        tuple(tuple(each[:end]) for each in places),
        tuple(tuple(each[:end]) for each in in_flight),
        tuple(cuts),
        num_asked,
    )


def _fastest(node: Node, tiers: Sequence[str], group: int) -> str | None:
    """Return the fastest tier that has the group's part of the block ready; None if none has."""
    first = group * len(tiers)
    for tier, residency in zip(tiers, node.residencies[first:], strict=False):
        if residency.state is State.READY:
            return tier
    return None
