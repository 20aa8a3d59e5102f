"""Damage to cached blocks, for the negative control: a comparison that can't fail proves nothing.

All of it runs on the engine thread, between requests, with the device's own copies, so that it
works for any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import stage
from kvtier.core.keys import grid_labels
from kvtier.core.types import BlockName, Slot
from kvtier.devices import Direction, Memory
from kvtier.layout import Layout, named_layout, part_view
from kvtier.serve.engine import Engine
from kvtier.tiers import MemoryTier, Outcome, Pieces, StorageTier
from kvtier.tools.bench_serve.options import BenchError

Bytes = npt.NDArray[np.uint8]
Place = Slot | BlockName
"""Location of a block: a slot in memory, or its name in storage."""

TIMEOUT_S = 60.0


class Damage(StrEnum):
    """Damage to one cached block."""

    REPEATED = "repeated"
    """Another block of the same prompt is in its place.

    Two blocks that change places would not do: keys carry their positions, and attention adds up
    the tokens of a prefix in any order, so that rounding alone would tell.
    """
    TOKEN = "token"
    """All keys and values of one token in it have the wrong sign.

    Less does not always show. A prompt of thousands of tokens gives each of them little weight, so
    that the change of one number, or of one head and layer, may be rounded away in bfloat16.
    """
    OTHER = "other"
    """It is replaced by another prompt's block."""


@contextmanager
def damaged(
    engine: Engine,
    tier: str,
    damage: Damage,
    prompt: Sequence[int],
    other: Sequence[int],
    seed: int,
) -> Iterator[None]:
    """Damage one block of ``prompt`` in ``tier`` within this context, and restore it at the end.

    The caller guarantees that no request runs and no copy is in flight (``Engine.drain``).

    Args:
        engine: the engine.
        tier: the tier.
        damage: kind of damage.
        prompt: a prompt with at least two blocks in ``tier``.
        other: a prompt whose first blocks are in ``tier`` too, for ``Damage.OTHER``.
        seed: chooses the block.

    Raises:
        BenchError: the tier does not hold the blocks to damage.
    """
    reader = Blocks(engine, tier)
    saved: dict[Place, Bytes] = {}

    def spoil() -> None:
        for place, content in _choose(reader, damage, prompt, other, seed).items():
            saved[place] = reader.read(place)
            if np.array_equal(content, saved[place]):
                raise BenchError(f"{damage} blocks have equal bytes: the control has no effect")
            reader.write(place, content)

    def restore() -> None:
        for place, content in saved.items():
            reader.write(place, content)

    try:
        engine.call(spoil)
        yield
    finally:
        engine.call(restore)


def _choose(
    blocks: Blocks, damage: Damage, prompt: Sequence[int], other: Sequence[int], seed: int
) -> dict[Place, Bytes]:
    """Return wrong content by the location at which to write it."""
    random = np.random.default_rng(seed)
    mine = blocks.places(prompt)
    if damage is Damage.REPEATED:
        first, second = (mine[at] for at in random.choice(len(mine), 2, replace=False))
        return {first: blocks.read(second)}
    if damage is Damage.TOKEN:
        place = mine[int(random.integers(len(mine)))]
        return {place: _with_wrong_sign(blocks, blocks.read(place), random)}
    theirs = blocks.places(other)
    at = int(random.integers(min(len(mine), len(theirs))))
    return {mine[at]: blocks.read(theirs[at])}


def _with_wrong_sign(blocks: Blocks, content: Bytes, random: np.random.Generator) -> Bytes:
    """Return ``content`` with the signs flipped of one token's numbers, in all parts and layers.

    The sign is the highest bit of every floating-point type.
    """
    wrong = content.copy()
    group = blocks.layout.group
    kind = np.dtype(f"uint{8 * group.dtype.itemsize}")
    token = int(random.integers(group.block_size))
    for part in range(len(group.parts)):
        view = part_view(wrong, blocks.layout, part)
        for layer, head in np.ndindex(view.shape[1], view.shape[3]):
            numbers = view[0, layer, token, head].view(kind)
            numbers ^= kind.type(1 << (8 * kind.itemsize - 1))
    return wrong


class Blocks:
    """Access to the bytes of a tier's blocks, in layout ``block_first``."""

    def __init__(self, engine: Engine, tier: str) -> None:
        self._cache: Cache = engine.cache
        self._info = engine.info
        self._namespace = engine.namespace_of("")
        self._name = tier
        self._tier, _ = engine.call(lambda: self._cache.places(tier, self._namespace, []))
        self.layout = named_layout("block_first", self._cache.group, 1)

    def places(self, prompt: Sequence[int]) -> Sequence[Place]:
        """Return the tier's locations of the blocks of ``prompt``, as far as it has them."""
        labels = grid_labels(prompt, self._info.block_size, self._info.chunk_tokens)
        _, held = self._cache.places(self._name, self._namespace, labels)
        if len(held) < 2:
            raise BenchError(
                f"the {self._name} tier holds {len(held)} blocks of the prompt: nothing to damage"
            )
        return held

    def read(self, place: Place) -> Bytes:
        """Return a copy of the block's bytes."""
        content = np.zeros(self.layout.nbytes, np.uint8)
        if isinstance(self._tier, StorageTier):
            assert isinstance(place, BlockName)
            (outcome,) = self._tier.get([place.key], _pieces(content), TIMEOUT_S)
            if outcome is not Outcome.THERE:
                raise BenchError(f"the {self._name} tier lost a block: {outcome.value}")
            return content
        assert not isinstance(place, BlockName)
        batch = stage(self._tier, [place], _Scratch(content, self.layout), [Slot(0)])
        self._cache.device.copy(batch, Direction.STORE)
        return content

    def write(self, place: Place, content: Bytes) -> None:
        """Overwrite the block's bytes."""
        if isinstance(self._tier, StorageTier):
            assert isinstance(place, BlockName)
            self._tier.drop([place.key], for_good=True)  # an existing block is not written again
            if self._tier.put([place], _pieces(content), TIMEOUT_S) != [Outcome.THERE]:
                raise BenchError(f"the {self._name} tier refused a block")
            return
        assert not isinstance(place, BlockName)
        batch = stage(_Scratch(content, self.layout), [Slot(0)], self._tier, [place])
        self._cache.device.copy(batch, Direction.LOAD)


def _pieces(content: Bytes) -> Pieces:
    return Pieces.whole([content.ctypes.data], content.nbytes)


class _Scratch(MemoryTier):
    """Memory tier of one block in an array, so that a device can copy from and to it."""

    def __init__(self, content: Bytes, layout: Layout) -> None:
        memory = Memory(content.ctypes.data, content.nbytes, "host", content)
        super().__init__("scratch", memory, layout)

    def close(self) -> None:
        """Do nothing: the array belongs to the caller."""
