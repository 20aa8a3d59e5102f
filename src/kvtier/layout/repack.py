"""Copies blocks between any two layouts, element by element: the oracle for the faster paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import LayoutError
from kvtier.layout.layout import Layout

Bytes = npt.NDArray[np.uint8]


def part_view(memory: Bytes, layout: Layout, part: int) -> Bytes:
    """Return a view of one part, which writes to the memory.

    The view is uint8 [num_blocks, num_layers, num_tokens, num_heads, dim * itemsize].

    memory: uint8 [>= layout.nbytes], contiguous.
    """
    strides = layout.parts[part]
    one = layer_view(memory, layout, part, 0)
    shape = (len(one), layout.group.num_layers, *one.shape[1:])
    steps = (one.strides[0], strides.layer, *one.strides[1:])
    return np.lib.stride_tricks.as_strided(one, shape, steps)


def layer_view(memory: Bytes, layout: Layout, part: int, layer: int) -> Bytes:
    """Return a view of one layer of a part, which writes to the memory.

    The view is uint8 [num_blocks, num_tokens, num_heads, dim * itemsize].
    """
    is_flat = memory.dtype == np.uint8 and memory.ndim == 1 and memory.flags.c_contiguous
    if not is_flat or memory.nbytes < layout.nbytes:
        raise LayoutError(
            f"a layout of {layout.nbytes} bytes needs a flat uint8 array of at least that size, "
            f"got {memory.dtype} {memory.shape} with strides {memory.strides}"
        )
    group, strides, kind = layout.group, layout.parts[part], layout.group.parts[part]
    shape = (
        layout.num_blocks,
        group.tokens_of(kind),
        kind.num_heads,
        kind.dim * group.dtype.itemsize,
    )
    steps = (strides.block, strides.token, strides.head, 1)
    return np.lib.stride_tricks.as_strided(memory[strides.begin(layer) :], shape, steps)


def repack(
    src: Bytes,
    src_layout: Layout,
    src_blocks: Sequence[int],
    dst: Bytes,
    dst_layout: Layout,
    dst_blocks: Sequence[int],
) -> None:
    """Copy block ``src_blocks[i]`` of ``src`` to block ``dst_blocks[i]`` of ``dst``."""
    if src_layout.group != dst_layout.group:
        raise LayoutError(f"{src_layout.group} and {dst_layout.group} hold different blocks")
    if len(src_blocks) != len(dst_blocks):
        raise LayoutError(f"{len(src_blocks)} blocks can't be copied to {len(dst_blocks)} places")
    group = src_layout.group
    for part, layer in product(range(len(group.parts)), range(group.num_layers)):
        source = layer_view(src, src_layout, part, layer)
        target = layer_view(dst, dst_layout, part, layer)
        target[list(dst_blocks)] = source[list(src_blocks)]
