"""Contiguous pieces of a block, in one layout and between two.

Between two layouts a block consists of *fragments*: pieces that are contiguous on both sides. Their
offsets are the same for every block up to a stride. So they are computed and merged once per pair
of layouts, and a batch of copies is one broadcast:

    src(b, f) = src_offset[f] + b * src_stride[f]        dst(b, f) likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import LayoutError
from kvtier.layout.layout import Layout, PartStrides

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Copy plan of one block between two layouts. All arrays int64 [num_fragments], bytes."""

    src_offset: Int64s
    src_stride: Int64s
    dst_offset: Int64s
    dst_stride: Int64s
    size: Int64s

    def src(self, blocks: Int64s) -> Int64s:
        """Return source offsets of each block's fragments: int64 [num_blocks, n], bytes."""
        return _begins(blocks, self.src_offset, self.src_stride)

    def dst(self, blocks: Int64s) -> Int64s:
        """Return destination offsets of each block's fragments: int64 [num_blocks, n], bytes."""
        return _begins(blocks, self.dst_offset, self.dst_stride)


@dataclass(frozen=True, slots=True, eq=False)
class SteppedFragments:
    """Copy plan of one block between two layouts, a few layers at a time.

    fragments: of all steps, in order.
    layers_per_step: step i copies the layers from ``i * layers_per_step`` on.
    counts: fragments of each step.
    num_bytes: bytes of each step.
    can_touch: per step, whether fragments of adjacent blocks are adjacent on both sides.
    """

    fragments: Fragments
    layers_per_step: int
    counts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    can_touch: tuple[bool, ...]


def spans(layout: Layout, block: int, layer: int) -> Int64s:
    """Return a block's spans in one layer: int64 [num_spans, 2] = (offset, length), bytes.

    Sorted by offset; adjacent pieces are one span.
    """
    if not (0 <= block < layout.num_blocks and 0 <= layer < layout.group.num_layers):
        raise LayoutError(
            f"block {block}, layer {layer} of a layout with {layout.num_blocks} blocks and "
            f"{layout.group.num_layers} layers"
        )
    pieces: list[tuple[int, int]] = []
    for index, strides in enumerate(layout.parts):
        run, rest = _common_run(layout, index, strides, strides, axes=("token", "head"))
        start = strides.begin(layer) + block * strides.block
        pieces += [(start + offset, run) for offset, _ in _offsets(rest, strides, strides)]
    merged: list[list[int]] = []
    for offset, length in sorted(pieces):
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1][1] += length
        else:
            merged.append([offset, length])
    return np.array(merged, np.int64)


@lru_cache(maxsize=64)
def fragments(src: Layout, dst: Layout) -> Fragments:
    """Return the largest pieces that are contiguous in both layouts, by ``dst`` offset."""
    if src.group != dst.group:
        raise LayoutError(
            f"blocks of {src.group} can't be copied into blocks of {dst.group}: make both tiers "
            "for the same model and block size"
        )
    return _as_arrays(_rows(src, dst, range(src.group.num_layers)))


@lru_cache(maxsize=256)
def stepped_fragments(src: Layout, dst: Layout, layers_per_step: int) -> SteppedFragments:
    """Return the fragments in steps of ``layers_per_step`` layers.

    If a fragment spans layers that the steps would separate, for example between two layouts with
    contiguous blocks, there is one step: many small copies would cost more than they hide.
    """
    whole, num_layers = fragments(src, dst), src.group.num_layers
    steps = [
        _rows(src, dst, range(first, min(first + layers_per_step, num_layers)))
        for first in range(0, num_layers, layers_per_step)
    ]
    if sum(map(len, steps)) > len(whole.size):
        steps, layers_per_step = [_rows(src, dst, range(num_layers))], num_layers
    return SteppedFragments(
        _as_arrays(list(chain.from_iterable(steps))),
        layers_per_step,
        tuple(map(len, steps)),
        tuple(sum(row[4] for row in step) for step in steps),
        tuple(any(row[1] == row[3] == row[4] for row in step) for step in steps),
    )


Row = tuple[int, int, int, int, int]
"""A fragment: (dst offset, dst stride, src offset, src stride, size)."""


def _rows(src: Layout, dst: Layout, layers: range) -> list[Row]:
    """Return the fragments of some layers by ``dst`` offset, merged."""
    rows: list[Row] = []
    for index, (src_part, dst_part) in enumerate(zip(src.parts, dst.parts, strict=True)):
        axes = ("layer", "token", "head")
        run, rest = _common_run(src, index, src_part, dst_part, axes, len(layers))
        src_start, dst_start = src_part.begin(layers.start), dst_part.begin(layers.start)
        rows += [
            (dst_start + to, dst_part.block, src_start + at, src_part.block, run)
            for at, to in _offsets(rest, src_part, dst_part)
        ]
    return _merged(sorted(rows))


def _as_arrays(rows: list[Row]) -> Fragments:
    table = np.array(rows, np.int64)
    return Fragments(
        src_offset=table[:, 2].copy(),
        src_stride=table[:, 3].copy(),
        dst_offset=table[:, 0].copy(),
        dst_stride=table[:, 1].copy(),
        size=table[:, 4].copy(),
    )


def _begins(blocks: Int64s, offset: Int64s, stride: Int64s) -> Int64s:
    """Return offset[f] + blocks[b] * stride[f].

    Equal strides, as in most layouts, need only one addition.
    """
    if (stride == stride[0]).all():
        return np.asarray(np.add.outer(blocks * stride[0], offset))
    return offset + blocks[:, None] * stride


def _merged(rows: list[Row]) -> list[Row]:
    """Merge fragments with the same strides that are adjacent on both sides."""
    merged: list[Row] = []
    for to, to_stride, at, at_stride, size in rows:
        if merged:
            last = merged[-1]
            if (last[0] + last[4], last[1], last[2] + last[4], last[3]) == (
                to, to_stride, at, at_stride,
            ):  # fmt: skip
                merged[-1] = (*last[:4], last[4] + size)
                continue
        merged.append((to, to_stride, at, at_stride, size))
    return merged


def _common_run(
    layout: Layout,
    index: int,
    src: PartStrides,
    dst: PartStrides,
    axes: tuple[str, ...],
    num_layers: int = 1,
) -> tuple[int, dict[str, int]]:
    """Return the bytes contiguous on both sides, and the remaining axes with their extents."""
    part = layout.group.parts[index]
    extents = {
        "layer": num_layers,
        "token": layout.group.tokens_of(part),
        "head": part.num_heads,
    }
    rest = {axis: extents[axis] for axis in axes if extents[axis] > 1}
    run = part.dim * src.dim
    while grown := next(
        (axis for axis in rest if getattr(src, axis) == run == getattr(dst, axis)), None
    ):
        run *= rest.pop(grown)
    return run, rest


def _offsets(extents: dict[str, int], src: PartStrides, dst: PartStrides) -> list[tuple[int, int]]:
    """Return the offsets of every combination of the remaining axes, on both sides."""
    return [
        (
            sum(i * getattr(src, axis) for i, axis in zip(at, extents, strict=True)),
            sum(i * getattr(dst, axis) for i, axis in zip(at, extents, strict=True)),
        )
        for at in product(*(range(count) for count in extents.values()))
    ]
