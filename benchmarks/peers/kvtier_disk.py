"""kvtier's disk tier, through its public calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvtier
from benchmarks.peers.store import BATCH, Arena, Store, key_of
from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Memory
from kvtier.layout import DType, full_attention
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskOptions, DiskTier, Verify

LAYER_BYTES = 65_536
"""Bytes of a block of 16 tokens in a layer: K and V, 8 heads of 128, two bytes each."""
NAMESPACE = bytes(32)


class KvtierDisk(Store):
    """A slab with room for the stored blocks and for writes beyond them."""

    version = kvtier.__version__

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, verify: str) -> None:
        super().__init__(arena, folder, num_blocks)
        num_layers, rest = divmod(arena.block_bytes, LAYER_BYTES)
        assert not rest, f"a block has a multiple of {LAYER_BYTES} bytes"
        address = arena.blocks.ctypes.data
        self._tier = DiskTier(
            DiskOptions(
                path=folder,
                capacity_bytes=(num_blocks + 4 * BATCH) * arena.block_bytes,
                verify=Verify(verify),
            ),
            full_attention(num_layers, 8, 128, DType.BFLOAT16, 16),
            Memory(address, arena.blocks.nbytes, "host", arena.buffer),
        )
        places = address + np.arange(BATCH) * arena.block_bytes
        self._blocks = Pieces.whole(places, arena.block_bytes)

    def store(self, numbers: Sequence[int]) -> None:
        names = [
            BlockName(NAMESPACE, depth, BlockKey(key_of(number)))
            for depth, number in enumerate(numbers)
        ]
        stored = self._tier.put(names, self._blocks.pick(slice(len(names))))
        assert all(each is Outcome.THERE for each in stored), "a block was not stored"

    def load(self, numbers: Sequence[int]) -> None:
        keys = [BlockKey(key_of(number)) for number in numbers]
        loaded = self._tier.get(keys, self._blocks.pick(slice(len(keys))))
        assert all(each is Outcome.THERE for each in loaded), "a block was not loaded"

    def forget(self, numbers: Sequence[int]) -> None:
        self._tier.drop([BlockKey(key_of(number)) for number in numbers])

    def close(self) -> None:
        self._tier.close()


open_store = KvtierDisk
