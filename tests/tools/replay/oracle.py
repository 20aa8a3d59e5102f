"""Reference caches, replayed block by block in the simplest way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvtier.tools.replay.trace import Trace, TraceBuilder, chained

Prompts = Sequence[Sequence[int]]
Block = tuple[int, ...]
"""A block's prefix, itself included. Two prompts share the blocks of their common beginning."""


def trace_of(prompts: Prompts, block_tokens: int = 1, seconds: float = 1.0) -> Trace:
    """Return a trace of prompts, given as lists of blocks, ``seconds`` apart."""
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
    """Return the hits of each prompt, and the number of stored blocks.

    The cache is a tree that evicts leaves, but none of the current prompt. If a block finds no free
    slot, neither it nor the blocks behind it are stored.
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
    """Return the maximum hits of any cache, by trying every choice of blocks to keep."""
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
