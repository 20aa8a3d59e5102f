"""Damage to cached blocks, for the negative control: a comparison that can't fail proves nothing.

The only place where a benchmark reaches into the cache. Everything runs on the engine thread,
between requests, and goes through the device's own copies, so that it works for any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.bench.options import BenchError
from kvtier.cache import Cache
from kvtier.devices import Direction, Memory
from kvtier.engine import Engine
from kvtier.index import State
from kvtier.keys import grid_labels
from kvtier.layout import Layout, named_layout, part_view
from kvtier.tiers import Addresses, LoadResult, MemoryTier, StorageTier
from kvtier.transfer import stage
from kvtier.types import BlockName, Slot

Bytes = npt.NDArray[np.uint8]


class Damage(StrEnum):
    """What is done to one cached block."""

    SWAPPED = "swapped"
    """It changes places with another block of the same prompt."""
    VALUE = "value"
    """One number in it has the wrong sign."""
    OTHER = "other"
    """Another prompt's block lies in its place."""


@contextmanager
def damaged(
    engine: Engine,
    tier: str,
    damage: Damage,
    prompt: Sequence[int],
    other: Sequence[int],
    seed: int,
) -> Iterator[None]:
    """Damage one block of ``prompt`` in ``tier`` while inside; then put the right bytes back.

    The caller guarantees that nothing runs and no copy is on its way (``Engine.drain``).
    other: a prompt whose first blocks are in ``tier`` too, for ``Damage.OTHER``.
    seed: chooses the block. ``BenchError`` where the tier does not hold what is to be damaged.
    """
    reader = _Blocks(engine, tier)
    saved: dict[Slot, Bytes] = {}

    def spoil() -> None:
        for slot, content in _choose(reader, damage, prompt, other, seed).items():
            saved[slot] = reader.read(slot)
            if np.array_equal(content, saved[slot]):
                raise BenchError(f"{damage} blocks have equal bytes: the control has no effect")
            reader.write(slot, content)

    def restore() -> None:
        for slot, content in saved.items():
            reader.write(slot, content)

    try:
        engine.call(spoil)
        yield
    finally:
        engine.call(restore)


def _choose(
    blocks: _Blocks, damage: Damage, prompt: Sequence[int], other: Sequence[int], seed: int
) -> dict[Slot, Bytes]:
    """Wrong content, by the slot where it is to go."""
    random = np.random.default_rng(seed)
    mine = blocks.slots(prompt)
    if damage is Damage.SWAPPED:
        first, second = (mine[at] for at in random.choice(len(mine), 2, replace=False))
        return {first: blocks.read(second), second: blocks.read(first)}
    if damage is Damage.VALUE:
        slot = mine[int(random.integers(len(mine)))]
        return {slot: _with_wrong_sign(blocks, blocks.read(slot), random)}
    theirs = blocks.slots(other)
    at = int(random.integers(min(len(mine), len(theirs))))
    return {mine[at]: blocks.read(theirs[at])}


def _with_wrong_sign(blocks: _Blocks, content: Bytes, random: np.random.Generator) -> Bytes:
    """``content`` with the sign turned of the largest number of one token, in one head and layer.

    Works on bits, where the sign is the highest and the rest orders numbers by size, so that it
    fits every floating-point type.
    """
    wrong = content.copy()
    group = blocks.layout.group
    part = int(random.integers(len(group.parts)))
    view = part_view(wrong, blocks.layout, part)
    place = tuple(int(random.integers(size)) for size in view.shape[1:4])
    kind = np.dtype(f"uint{8 * group.dtype.itemsize}")
    numbers = view[(0, *place)].view(kind)
    sign = kind.type(1 << (8 * kind.itemsize - 1))
    numbers[int(np.argmax(numbers & ~sign))] ^= sign
    return wrong


class _Blocks:
    """Bytes of a tier's blocks, ``block_first``, whatever the tier's own layout."""

    def __init__(self, engine: Engine, tier: str) -> None:
        self._cache: Cache = engine.cache
        self._info = engine.info
        self._namespace = engine._namespace_of("")
        self._tier = self._cache._ladder.tiers[tier]
        self._names: dict[Slot, BlockName] = {}
        self.layout = named_layout("block_first", self._cache.group, 1)

    def slots(self, prompt: Sequence[int]) -> list[Slot]:
        """Where the tier has the blocks of ``prompt``, from its start as far as it has them."""
        index, name = self._cache._index, self._tier.name
        labels = grid_labels(prompt, self._info.block_size, self._info.chunk_tokens)
        blocks = index.match(self._namespace, labels).blocks
        held = [block for block in blocks if index.state(block, name) is State.READY]
        if len(held) < 2:
            raise BenchError(
                f"the {name} tier holds {len(held)} blocks of the prompt: nothing to damage"
            )
        slots = index.slots(held, name)
        self._names.update(zip(slots, map(index.name, held), strict=True))
        return slots

    def read(self, slot: Slot) -> Bytes:
        """A copy of the block's bytes."""
        content = np.zeros(self.layout.nbytes, np.uint8)
        if isinstance(self._tier, StorageTier):
            (result,) = self._tier.load([self._names[slot].key], [slot], _address(content))
            if result is not LoadResult.OK:
                raise BenchError(f"the {self._tier.name} tier lost a block: {result.value}")
            return content
        assert isinstance(self._tier, MemoryTier)
        batch = stage(self._tier, [slot], _Scratch(content, self.layout), [Slot(0)])
        self._cache._device.copy(batch, Direction.STORE)
        return content

    def write(self, slot: Slot, content: Bytes) -> None:
        """Overwrite the block's bytes."""
        if isinstance(self._tier, StorageTier):
            if not all(self._tier.store([self._names[slot]], [slot], _address(content))):
                raise BenchError(f"the {self._tier.name} tier refused a block")
            return
        assert isinstance(self._tier, MemoryTier)
        batch = stage(_Scratch(content, self.layout), [Slot(0)], self._tier, [slot])
        self._cache._device.copy(batch, Direction.LOAD)


def _address(content: Bytes) -> Addresses:
    return np.array([content.ctypes.data], np.uint64)


class _Scratch(MemoryTier):
    """One block in an array of ours, so that a device can copy from and to it."""

    def __init__(self, content: Bytes, layout: Layout) -> None:
        memory = Memory(content.ctypes.data, content.nbytes, "host", content)
        super().__init__("scratch", memory, layout)

    def close(self) -> None:
        """Nothing to give back: the array belongs to the caller."""
