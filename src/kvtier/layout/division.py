"""Division of KV heads and layers over the ranks of an engine, and over shards of stored blocks.

A rank has some KV heads of some layers. A store has its blocks in shards that are the same for all
parallel sizes, and a rank reads and writes those whose heads and layers it has:

    8 KV heads, 4 shards      TP 1: |0 1|2 3|4 5|6 7|     TP 2: |0 1|2 3| and |4 5|6 7|
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd

from blake3 import blake3

from kvtier.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model's KV heads and layers over the ranks of an engine, and over shards.

    Args:
        num_heads: KV heads of a layer, in the whole model; 1 for the latents of MLA.
        tp_rank, tp_size: which ranks have them.
        shard_heads: heads of a shard.
        stage_layers: layers of a shard; 0 for all that a rank has.
    """

    num_heads: int
    tp_rank: int
    tp_size: int
    shard_heads: int
    stage_layers: int = 0

    @classmethod
    def of(
        cls, storage_shards: int, num_heads: int, tp_rank: int, tp_size: int, stage_layers: int = 0
    ) -> Division:
        """Return the division of an engine.

        storage_shards: the setting; the number of shards is its greatest common divisor with
        ``num_heads``.

        Raises ``ConfigError`` if a rank would have a part of a shard.
        """
        if max(num_heads, tp_size) % min(num_heads, tp_size):
            raise ConfigError(
                f"storage_shards: {num_heads} KV heads can't be shared out among {tp_size} ranks; "
                "leave it out"
            )
        num_shards = gcd(num_heads, storage_shards)
        if num_shards % min(tp_size, num_heads):
            raise ConfigError(
                f"storage_shards: {storage_shards} shards of {num_heads} KV heads are "
                f"{num_shards}, and no whole number on each of {tp_size} ranks; use a multiple of "
                f"{tp_size} that divides {num_heads}"
            )
        return cls(num_heads, tp_rank, tp_size, num_heads // num_shards, stage_layers)

    @property
    def num_own(self) -> int:
        """KV heads of a rank."""
        return max(1, self.num_heads // self.tp_size)

    @property
    def first_own(self) -> int:
        """First KV head of this rank. Ranks beyond the heads share one."""
        return self.tp_rank * self.num_heads // self.tp_size

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the first one that has its heads."""
        return self.tp_rank * self.num_heads % self.tp_size == 0

    @property
    def firsts(self) -> range:
        """First head of each shard of this rank, counted from ``first_own``."""
        return range(0, self.num_own, self.shard_heads)

    def shard_name(self, first: int, order: object) -> bytes:
        """Return the name of a shard, equal for all ranks that have the same bytes in it.

        Args:
            first: its first head, counted from ``first_own``.
            order: what decides on the order of its bytes, whatever the number of ranks, as JSON
                can hold it.
        """
        heads = [self.first_own + first, self.shard_heads, self.num_heads]
        return blake3(json.dumps([heads, order]).encode()).digest()
