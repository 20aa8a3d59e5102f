"""Pools that an engine holds as several tensors: one per layer, K and V together or separate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import LayoutError
from kvtier.layout.group import KVGroup
from kvtier.layout.layout import Layout, PartStrides


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Address and strides of one part (K, V or latent) of one layer.

    address: of block 0.
    block, token, head: strides in bytes; the elements of a head are contiguous.
    """

    address: int
    block: int
    token: int
    head: int


def over_tensors(
    group: KVGroup, places: Sequence[Sequence[TensorSlice]], num_blocks: int
) -> tuple[int, Layout]:
    """Return the layout of ``num_blocks`` blocks in many tensors, as one memory around them all.

    places: by part, then by layer.
    Returns the address where that memory begins, and the layout. Copies between layouts do not
    access the gaps between the tensors.
    """
    if [len(part) for part in places] != [group.num_layers] * len(group.parts):
        raise LayoutError(
            f"a pool of {len(group.parts)} parts and {group.num_layers} layers needs a place for "
            f"each, got {[len(part) for part in places]}"
        )
    itemsize = group.dtype.itemsize
    begin = min(place.address for part in places for place in part)
    end = begin
    parts = []
    for part, layers in zip(group.parts, places, strict=True):
        strides = {(place.block, place.token, place.head) for place in layers}
        if len(strides) > 1:
            raise LayoutError(f"the layers of part {part.name!r} differ in strides: {strides}")
        block, token, head = strides.pop()
        counts = ((num_blocks, block), (group.tokens_of(part), token), (part.num_heads, head))
        if any(stride < 0 for _, stride in counts):
            raise LayoutError(f"part {part.name!r} has strides below 0: {block}, {token}, {head}")
        last = sum((count - 1) * stride for count, stride in counts) + part.dim * itemsize
        end = max([end, *(place.address + last for place in layers)])
        parts.append(
            PartStrides(
                offset=layers[0].address - begin,
                layer=0,
                block=block,
                token=token,
                head=head,
                dim=itemsize,
                layers=tuple(place.address - begin for place in layers),
            )
        )
    return begin, Layout(group, (), num_blocks, tuple(parts), end - begin)
