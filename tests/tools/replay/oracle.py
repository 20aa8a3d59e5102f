"""Caches replayed block by block, as slowly and plainly as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvtier.tools.replay.trace import Trace, TraceBuilder, chained

Prompts = Sequence[Sequence[int]]
Block = tuple[int, ...]
"""A block's prefix, itself included: two prompts share it where they agree so far."""


def trace_of(prompts: Prompts, block_tokens: int = 1, seconds: float = 1.0) -> Trace:
    """A trace of prompts that are lists of blocks, ``seconds`` apart."""
    builder = TraceBuilder(block_tokens)
    for at, prompt in enumerate(prompts):
        keys = chained(np.array(prompt, np.uint64))
        builder.add(at * seconds, keys, len(prompt) * block_tokens, 1)
    return builder.build()


def path(prompt: Sequence[int]) -> list[Block]:
    return [tuple(prompt[: end + 1]) for end in range(len(prompt))]


def prefix_hits(blocks: Sequence[Block], cached: object) -> int:
    found = 0
    while found < len(blocks) and blocks[found] in cached:  # type: ignore[operator]
        found += 1
    return found


def lru_hits(prompts: Prompts, capacity: int) -> tuple[list[int], int]:
    """Hits per prompt, and blocks stored.

    A tree that evicts leaves, and none of the prompt that it works on; a block that finds no room
    is not stored, nor are those behind it.
    """
    used: dict[Block, int] = {}
    hits, stored = [], 0
    for now, prompt in enumerate(prompts):
        blocks = path(prompt)
        hits.append(prefix_hits(blocks, used))
        for block in blocks:
            if block not in used:
                if len(used) >= capacity and not _evict(used, set(blocks)):
                    break
                stored += 1
            used[block] = now
    return hits, stored


def _evict(used: dict[Block, int], pinned: set[Block]) -> bool:
    inner = {block[:-1] for block in used}
    leaves = [block for block in used if block not in inner and block not in pinned]
    if not leaves:
        return False
    del used[min(leaves, key=lambda block: (used[block], -len(block)))]
    return True


def most_hits(prompts: Prompts, capacity: int) -> int:
    """The most hits that any cache could have: every choice of what to keep is tried."""
    states: dict[frozenset[Block], int] = {frozenset(): 0}
    for prompt in prompts:
        blocks = path(prompt)
        reached: dict[frozenset[Block], int] = {}
        for cached, hits in states.items():
            total = hits + prefix_hits(blocks, cached)
            at_hand = sorted(cached | set(blocks))
            for size in range(min(capacity, len(at_hand)) + 1):
                for kept in combinations(at_hand, size):
                    state = frozenset(kept)
                    reached[state] = max(reached.get(state, 0), total)
        states = reached
    return max(states.values())
