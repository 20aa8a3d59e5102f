"""Locations of bytes in every named layout, for every kind of group."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import LayoutError
from kvtier.layout import (
    ORDERS,
    Attention,
    Axis,
    DType,
    KVGroup,
    Layout,
    Part,
    arrange,
    fragments,
    full_attention,
    latent_attention,
    named_layout,
    part_view,
    recurrent_state,
    repack,
    sliding_attention,
    spans,
)

GROUPS = {
    "gqa": full_attention(3, 2, 4, DType.FLOAT16, 4),
    "one of everything": full_attention(1, 1, 1, DType.UINT8, 1),
    "mla": latent_attention(3, 6, 2, DType.BFLOAT16, 4),
    "sliding": sliding_attention(2, 2, 4, 8, DType.FLOAT8, 2),
    "recurrent": recurrent_state(2, (("conv", 3, 5), ("ssm", 2, 4)), DType.FLOAT32, 4),
    "uneven heads": KVGroup(
        Attention.FULL, 2, (Part("k", 4, 2), Part("v", 2, 2)), DType.FLOAT16, 2
    ),
}
NAMES = sorted(ORDERS)
EVERY = pytest.mark.parametrize(("group", "name"), list(product(GROUPS, NAMES)))


def _addresses(layout: Layout, part: int) -> npt.NDArray[np.int64]:
    """int64 [num_blocks, num_layers, num_tokens, num_heads, dim], straight from the formula."""
    group, strides, kind = layout.group, layout.parts[part], layout.group.parts[part]
    shape = (
        layout.num_blocks,
        group.num_layers,
        group.tokens_of(kind),
        kind.num_heads,
        kind.dim,
    )
    steps = (strides.block, strides.layer, strides.token, strides.head, strides.dim)
    index = np.indices(shape)
    return strides.offset + sum(step * at for step, at in zip(steps, index, strict=True))


def _bytes_at(addresses: npt.NDArray[np.int64], itemsize: int) -> set[int]:
    return {int(at) + i for at in addresses.ravel() for i in range(itemsize)}


def _noise(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# -- properties of one layout ----------------------------------------------------------------------


@EVERY
def test_every_element_has_an_address_of_its_own(group: str, name: str) -> None:
    layout = named_layout(name, GROUPS[group], 3)
    parts = range(len(layout.parts))
    addresses = np.concatenate([_addresses(layout, part).ravel() for part in parts])
    itemsize = layout.group.dtype.itemsize
    assert np.array_equal(np.sort(addresses), np.arange(0, layout.nbytes, itemsize))
    assert layout.nbytes == 3 * layout.group.bytes_per_block


@EVERY
def test_spans_are_the_bytes_of_the_block_in_the_layer(group: str, name: str) -> None:
    layout = named_layout(name, GROUPS[group], 3)
    for block, layer in product(range(3), range(layout.group.num_layers)):
        expected: set[int] = set()
        for part in range(len(layout.parts)):
            at = _addresses(layout, part)[block, layer]
            expected |= _bytes_at(at, layout.group.dtype.itemsize)
        found = spans(layout, block, layer)
        covered = [at for start, size in found.tolist() for at in range(start, start + size)]
        assert len(covered) == len(set(covered))
        assert set(covered) == expected
        assert (found[1:, 0] > found[:-1].sum(axis=1)).all(), "neighbours that are not one span"


@EVERY
def test_part_view_is_the_formula(group: str, name: str) -> None:
    layout = named_layout(name, GROUPS[group], 3)
    memory = _noise(layout.nbytes)
    itemsize = layout.group.dtype.itemsize
    for part in range(len(layout.parts)):
        at = _addresses(layout, part)
        each_byte = at[..., None] + np.arange(itemsize)
        expected = memory[each_byte].reshape(*at.shape[:-1], -1)
        np.testing.assert_array_equal(part_view(memory, layout, part), expected)


def test_equal_layouts_compare_equal_and_blocks_that_differ_do_not() -> None:
    group = GROUPS["gqa"]
    assert named_layout("block_first", group, 3) == named_layout("block_first", group, 3)
    assert len({each.fingerprint for each in GROUPS.values()}) == len(GROUPS)
    assert full_attention(3, 2, 4, DType.FLOAT16, 4).fingerprint == group.fingerprint
    assert full_attention(3, 2, 4, DType.BFLOAT16, 4).fingerprint != group.fingerprint


# -- two layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.permutations(range(6)),
    st.permutations(range(5)),
    st.integers(0, 5),
)
def test_fragments_copy_what_repack_copies(
    group: str, src_name: str, dst_name: str, src_blocks: list[int], dst_blocks: list[int], n: int
) -> None:
    _compare_with_repack(GROUPS[group], src_name, dst_name, src_blocks[:n], dst_blocks[:n])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("src_name", NAMES)
def test_fragments_copy_what_repack_copies_for_all_pairs(group: str, src_name: str) -> None:
    for dst_name in NAMES:
        _compare_with_repack(GROUPS[group], src_name, dst_name, [4, 0, 3], [1, 2, 0])


def _compare_with_repack(
    group: KVGroup, src_name: str, dst_name: str, src_blocks: list[int], dst_blocks: list[int]
) -> None:
    src_layout, dst_layout = named_layout(src_name, group, 6), named_layout(dst_name, group, 5)
    src, by_pieces = _noise(src_layout.nbytes, 1), _noise(dst_layout.nbytes, 2)
    by_elements = by_pieces.copy()
    pieces = fragments(src_layout, dst_layout)
    for src_block, dst_block in zip(src_blocks, dst_blocks, strict=True):
        at = pieces.src_offset + src_block * pieces.src_stride
        to = pieces.dst_offset + dst_block * pieces.dst_stride
        for i, size in enumerate(pieces.size.tolist()):
            by_pieces[to[i] : to[i] + size] = src[at[i] : at[i] + size]
    repack(src, src_layout, src_blocks, by_elements, dst_layout, dst_blocks)
    np.testing.assert_array_equal(by_pieces, by_elements)
    assert pieces.size.sum() == group.bytes_per_block
    assert (np.diff(pieces.dst_offset) > 0).all()


@pytest.mark.parametrize(
    ("src", "dst", "num_fragments"),
    [
        ("layer_first", "block_first", 3 * 2),
        ("part_first", "page_first_direct", 3 * 2),
        ("layer_first", "page_first", 3 * 2 * 4),
        ("layer_first", "page_head", 3 * 2 * 4 * 2),
        ("page_first_direct", "page_first_kv_split", 2),
        ("page_first", "page_first", 2),
    ],
)
def test_fragments_are_as_large_as_the_layouts_allow(
    src: str, dst: str, num_fragments: int
) -> None:
    """3 layers, 2 parts, 4 tokens, 2 heads."""
    group = GROUPS["gqa"]
    pieces = fragments(named_layout(src, group, 2), named_layout(dst, group, 2))
    assert len(pieces.size) == num_fragments


# -- the layouts of others, built another way ------------------------------------------------------

NUM_BLOCKS = 3
# From [part, block, layer, token, head, dim] to the shapes that SGLang documents for its pools,
# where `size` is tokens of all blocks and `page` tokens of one.
SHAPES = {
    "part_first": (0, 2, 1, 3, 4, 5),  # its layer_first: (2, L, size, H, D)
    "page_first": (0, 1, 3, 2, 4, 5),  # (2, size, L, H, D)
    "page_first_direct": (0, 1, 2, 3, 4, 5),  # (2, pages, L, page, H, D)
    "page_first_kv_split": (0, 1, 2, 3, 4, 5),  # two of (pages, L, page, H, D)
    "page_head": (0, 1, 4, 3, 2, 5),  # (2, pages, H, page, L, D)
    "layer_first": (2, 0, 1, 3, 4, 5),  # ours: (L, 2, pages, page, H, D)
    "block_first": (1, 2, 0, 3, 4, 5),  # ours: (pages, L, 2, page, H, D)
}


def _fill(layout: Layout, parts: list[npt.NDArray[np.generic]]) -> bytes:
    memory = np.zeros(layout.nbytes, np.uint8)
    for index, values in enumerate(parts):
        view = part_view(memory, layout, index)
        view[:] = np.ascontiguousarray(values).view(np.uint8).reshape(view.shape)
    return memory.tobytes()


def test_every_named_layout_is_checked() -> None:
    assert set(SHAPES) == set(ORDERS)


@pytest.mark.parametrize("name", SHAPES)
def test_layout_is_the_transposed_array(name: str) -> None:
    group = GROUPS["gqa"]
    canonical = np.arange(2 * NUM_BLOCKS * 3 * 4 * 2 * 4, dtype=np.uint16).reshape(
        2, NUM_BLOCKS, 3, 4, 2, 4
    )
    expected = np.ascontiguousarray(canonical.transpose(SHAPES[name])).tobytes()
    assert _fill(named_layout(name, group, NUM_BLOCKS), list(canonical)) == expected


@pytest.mark.parametrize("name", ["page_first", "page_first_direct", "page_first_kv_split"])
def test_latent_and_rope_lie_in_buffers_of_their_own_width(name: str) -> None:
    group = GROUPS["mla"]
    sizes = (NUM_BLOCKS, group.num_layers, group.block_size, 1)
    latent, rope = (
        np.arange(np.prod(sizes) * width, dtype=np.uint16).reshape(*sizes, width) + 1000 * width
        for width in (6, 2)
    )
    order = [axis - 1 for axis in SHAPES[name][1:]]
    buffers = [np.ascontiguousarray(part.transpose(order)).tobytes() for part in (latent, rope)]
    assert _fill(named_layout(name, group, NUM_BLOCKS), [latent, rope]) == b"".join(buffers)


def test_parts_may_be_fused_per_token() -> None:
    """MLA pools of other engines: (L, size, 1, kv_lora_rank + rope_dim)."""
    order = (Axis.LAYER, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.PART, Axis.DIM)
    group = GROUPS["mla"]
    fused = np.arange(3 * NUM_BLOCKS * 4 * 8, dtype=np.uint16).reshape(3, NUM_BLOCKS, 4, 1, 8)
    per_block = fused.transpose(1, 0, 2, 3, 4)
    filled = _fill(arrange(group, order, NUM_BLOCKS), [per_block[..., :6], per_block[..., 6:]])
    assert filled == fused.tobytes()


# -- what does not fit -----------------------------------------------------------------------------


def test_blocks_of_another_model_are_refused() -> None:
    one, other = (named_layout("block_first", GROUPS[name], 2) for name in ("gqa", "mla"))
    with pytest.raises(LayoutError, match="can't be copied"):
        fragments(one, other)
    memory = np.zeros(1 << 12, np.uint8)
    with pytest.raises(LayoutError, match="different blocks"):
        repack(memory, one, [0], memory, other, [0])


def test_as_many_blocks_have_to_leave_as_arrive() -> None:
    layout = named_layout("block_first", GROUPS["gqa"], 2)
    memory = np.zeros(layout.nbytes, np.uint8)
    with pytest.raises(LayoutError, match="1 blocks can't be copied to 2"):
        repack(memory, layout, [0], memory, layout, [0, 1])


def test_memory_that_is_too_small_or_not_flat_is_refused() -> None:
    layout = named_layout("block_first", GROUPS["gqa"], 2)
    enough = layout.nbytes
    wrong: tuple[Any, ...] = (
        np.zeros(enough - 1, np.uint8),
        np.zeros((2, enough), np.uint8),
        np.zeros(enough, np.int8),
        np.zeros(2 * enough, np.uint8)[::2],
    )
    for memory in wrong:
        with pytest.raises(LayoutError, match=f"{enough} bytes"):
            part_view(memory, layout, 0)


@pytest.mark.parametrize(("block", "layer"), [(-1, 0), (2, 0), (0, -1), (0, 3)])
def test_spans_outside_the_layout_are_refused(block: int, layer: int) -> None:
    with pytest.raises(LayoutError, match="2 blocks and 3 layers"):
        spans(named_layout("block_first", GROUPS["gqa"], 2), block, layer)


def test_unusable_orders_are_refused() -> None:
    axes = tuple(Axis)
    group = GROUPS["gqa"]
    for order, part in (
        (axes[:-1], "once"),
        ((*axes, Axis.DIM), "once"),
        (axes[::-1], "dim axis must be the innermost"),
    ):
        with pytest.raises(LayoutError, match=part):
            arrange(group, order, 1)
    with pytest.raises(LayoutError, match="0 or more"):
        arrange(group, axes, -1)
    with pytest.raises(LayoutError, match="no layout is called 'page_last'.*page_first"):
        named_layout("page_last", group, 1)


def test_uneven_axis_outside_the_parts_is_refused() -> None:
    order = (Axis.BLOCK, Axis.LAYER, Axis.TOKEN, Axis.HEAD, Axis.PART, Axis.DIM)
    with pytest.raises(LayoutError, match=r"\[4, 2\] entries along head"):
        arrange(GROUPS["uneven heads"], order, 2)


def test_unusable_groups_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one of everything"):
        full_attention(0, 1, 1, DType.FLOAT16, 16)
    with pytest.raises(LayoutError, match="at least one of everything"):
        KVGroup(Attention.FULL, 1, (), DType.FLOAT16, 16)
    with pytest.raises(LayoutError, match="window=0 with sliding"):
        sliding_attention(1, 1, 1, 0, DType.FLOAT16, 16)
    with pytest.raises(LayoutError, match="window=8 with full"):
        KVGroup(Attention.FULL, 1, (Part("k", 1, 1),), DType.FLOAT16, 16, window=8)


@pytest.mark.parametrize("dtype", ["float13", None, np.float32, np.dtype("float32")])
def test_unknown_dtype_is_refused_by_name(dtype: Any) -> None:
    with pytest.raises(LayoutError, match=r"dtype=.* is unknown; use one of float32, "):
        full_attention(1, 1, 1, dtype, 16)


@pytest.mark.parametrize("size", [16.0, "16", None])
def test_size_that_is_no_integer_is_refused_by_name(size: Any) -> None:
    with pytest.raises(LayoutError, match="block_size=.* is no integer"):
        full_attention(1, 1, 1, DType.FLOAT16, size)
    with pytest.raises(LayoutError, match="dim=.* is no integer"):
        full_attention(1, 1, size, DType.FLOAT16, 1)


def test_equal_groups_have_one_fingerprint_however_they_are_written() -> None:
    group = full_attention(2, 4, 8, DType.FLOAT16, 16)
    size: Any = np.int64(16)
    dtype: Any = "float16"
    other = full_attention(2, 4, 8, dtype, size)
    assert other.fingerprint == group.fingerprint
