"""Layout of KV memory: named axes in an order, and the strides that follow.

An element has the index (part, layer, block, token, head, dim). A layout is an order of these six
axes over one memory; the addresses follow:

    address(part, l, b, t, h, d) = offset[part] + l*layer + b*block + t*token + h*head + d*dim

Parts may differ in width (MLA). They are adjacent inside the ``PART`` axis, so axes outside it
stride over all parts together, and axes inside it over one part only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.core.errors import LayoutError
from kvtier.layout.group import KVGroup, Part


class Axis(Enum):
    PART = "part"
    LAYER = "layer"
    BLOCK = "block"
    TOKEN = "token"
    HEAD = "head"
    DIM = "dim"


@dataclass(frozen=True, slots=True)
class PartStrides:
    """Strides of one part along each axis, in bytes, and its offset."""

    offset: int
    layer: int
    block: int
    token: int
    head: int
    dim: int

    def begin(self, layer: int) -> int:
        """Return the offset of block 0 of ``layer``, in bytes."""
        return self.offset + layer * self.layer


@dataclass(frozen=True, slots=True)
class Layout:
    """``num_blocks`` blocks of a group, arranged in one memory of ``nbytes`` bytes.

    order: outermost axis first.
    parts: strides, in the order of ``group.parts``.
    Create it by ``arrange``. Equal layouts have equal addresses.
    """

    group: KVGroup
    order: tuple[Axis, ...]
    num_blocks: int
    parts: tuple[PartStrides, ...]
    nbytes: int

    def __hash__(self) -> int:  # a hash of all fields would cost more than the look-ups that use it
        return hash((self.num_blocks, self.nbytes))

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks; ``nbytes`` also counts the gaps between them."""
        return self.num_blocks * self.group.bytes_per_block


def arrange(group: KVGroup, order: tuple[Axis, ...], num_blocks: int) -> Layout:
    """Return the layout of ``num_blocks`` blocks in ``order``, without gaps.

    order: each axis once, outermost first; ``DIM`` last, because no known KV layout splits a head.
    Raises ``LayoutError`` unless all parts have equal lengths along the axes outside ``PART``.
    """
    if sorted(axis.value for axis in order) != sorted(axis.value for axis in Axis):
        raise LayoutError(f"a layout needs each of {[a.value for a in Axis]} once, got {order}")
    if order[-1] is not Axis.DIM:
        raise LayoutError(f"the dim axis must be the innermost, got {[a.value for a in order]}")
    if num_blocks < 0:
        raise LayoutError(f"a layout of {num_blocks} blocks; give 0 or more")
    extents = [group.dtype.itemsize] * len(group.parts)
    offsets = [0] * len(group.parts)
    strides: list[dict[Axis, int]] = [{} for _ in group.parts]
    is_outside_part = False
    for axis in reversed(order):
        if axis is Axis.PART:
            is_outside_part = True
            for index in range(len(extents)):
                offsets[index] = sum(extents[:index])
            extents = [sum(extents)] * len(extents)
            continue
        counts = [_count(group, part, axis, num_blocks) for part in group.parts]
        if is_outside_part and len(set(counts)) > 1:
            raise LayoutError(
                f"parts of {counts} entries along {axis.value} can't lie inside that axis; "
                f"put it inside the part axis, got {[a.value for a in order]}"
            )
        for index, count in enumerate(counts):
            strides[index][axis] = extents[index]
            extents[index] *= count
    parts = tuple(
        PartStrides(
            offset=offset,
            layer=stride[Axis.LAYER],
            block=stride[Axis.BLOCK],
            token=stride[Axis.TOKEN],
            head=stride[Axis.HEAD],
            dim=stride[Axis.DIM],
        )
        for offset, stride in zip(offsets, strides, strict=True)
    )
    return Layout(group, order, num_blocks, parts, nbytes=num_blocks * group.bytes_per_block)


def _count(group: KVGroup, part: Part, axis: Axis, num_blocks: int) -> int:
    """Return the entries along ``axis`` in one part."""
    return {
        Axis.LAYER: group.num_layers,
        Axis.BLOCK: num_blocks,
        Axis.TOKEN: group.tokens_of(part),
        Axis.HEAD: part.num_heads,
        Axis.DIM: part.dim,
    }[axis]
