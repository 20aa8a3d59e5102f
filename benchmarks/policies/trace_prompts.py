"""Part of a trace as prompts of real tokens, for engines that compute them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from benchmarks.engines.requests import VOCABULARY
from benchmarks.policies.traces import Keys, Trace

FROM_BLOCK = 3
"""Blocks before this one are system prompts, which conversations share."""


@dataclass(frozen=True)
class Prompts:
    """Requests in order of arrival."""

    chains: list[Keys]
    """Block keys of each request."""
    block_tokens: int
    """Tokens of a block."""

    @cached_property
    def num_blocks(self) -> int:
        """Number of different blocks."""
        return len(np.unique(np.concatenate(self.chains)))

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return max(map(len, self.chains))

    def tokens(self, number: int) -> list[int]:
        """Return the tokens of one request; equal keys have equal tokens, and one more follows."""
        blocks = (block_of(int(key), self.block_tokens) for key in self.chains[number])
        return [*(token for block in blocks for token in block), VOCABULARY[number % 1000]]


def part_of(trace: Trace, share: float, most_blocks: int, block_tokens: int) -> Prompts:
    """Return a ``share`` of the conversations, each of them whole, in the order of arrival.

    Prompts of more than ``most_blocks`` blocks are left out.
    """
    limit = int(share * 2**64)

    def is_in(chain: Keys) -> bool:
        first = int(chain[min(FROM_BLOCK, len(chain) - 1)])
        return len(chain) <= most_blocks and random.Random(first).getrandbits(64) < limit

    return Prompts([chain for chain in trace.chains if is_in(chain)], block_tokens)


@lru_cache(maxsize=4096)
def block_of(key: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a block."""
    rng = random.Random(key)
    return tuple(rng.choice(VOCABULARY) for _ in range(num_tokens))
