"""Pages are derived from shapes and strides, for the layout of any backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvtier.connectors.common.paged_pool import GroupPages
from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.pages import (
    Cache,
    EnginePages,
    LayerSize,
    tell_pages,
    tell_tokens,
    tensors_of,
)
from kvtier.core.errors import LayoutError
from kvtier.core.types import Slot
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice

NUM_PAGES, TOKENS, HEADS, DIM = 7, 4, 2, 8
PART = TOKENS * HEADS * DIM
"""Bytes of the keys of a page; the values have as many."""


def _memory(*shape: int) -> torch.Tensor:
    """Return memory with different numbers, as far as bytes allow."""
    made = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.int64) * 131 % 251
    return made.to(torch.uint8).view(shape)


def _told(cache: Cache, page_bytes: int = 2 * PART) -> EnginePages:
    return tell_pages({"a": cache}, [[LayerSize("a", [page_bytes])]], NUM_PAGES)


def _bytes(pages: EnginePages, page: int) -> list[int]:
    """Return the bytes of a page, share by share, read at their addresses."""
    found: list[int] = []
    for share in pages.groups[0]:
        for tensor in pages.tensors:
            begin = share.address + page * share.stride - tensor.untyped_storage().data_ptr()
            if 0 <= begin < tensor.untyped_storage().nbytes():
                flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                found += flat[begin : begin + share.nbytes].tolist()
                break
    return found


def _by_index(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return all bytes of one page by ordinary indexing."""
    return sorted(number for part in parts for number in part.flatten().tolist())


BLOCKS_FIRST = _memory(NUM_PAGES, 2, TOKENS, HEADS, DIM)
KEYS_FIRST = _memory(2, NUM_PAGES, TOKENS, HEADS, DIM)
HEADS_INSIDE = _memory(NUM_PAGES, 2, HEADS, TOKENS, DIM).transpose(2, 3)
BLOCKS_INSIDE = _memory(NUM_PAGES, 2, TOKENS, HEADS, DIM).transpose(0, 1)
TWO_ROWS = _memory(2 * NUM_PAGES, 2, TOKENS // 2, HEADS, DIM)
PADDED = _memory(NUM_PAGES, 3 * PART)[:, : 2 * PART].view(NUM_PAGES, TOKENS, HEADS * 2, DIM)


@pytest.mark.parametrize(
    ("cache", "num_shares", "pages"),
    [
        (BLOCKS_FIRST, 1, lambda at: [BLOCKS_FIRST[at]]),
        (KEYS_FIRST, 2, lambda at: [KEYS_FIRST[0, at], KEYS_FIRST[1, at]]),
        (HEADS_INSIDE, 1, lambda at: [HEADS_INSIDE[at]]),
        (BLOCKS_INSIDE, 1, lambda at: [BLOCKS_INSIDE[:, at]]),
        (TWO_ROWS, 1, lambda at: [TWO_ROWS[2 * at : 2 * at + 2]]),
        (PADDED, 1, lambda at: [PADDED[at]]),
    ],
    ids=["blocks first", "keys first", "heads inside", "blocks inside", "two rows", "padded"],
)
def test_every_byte_of_a_page_is_in_one_share(cache: Cache, num_shares: int, pages: object) -> None:
    told = _told(cache)
    assert len(told.groups[0]) == num_shares
    assert callable(pages)
    for at in (0, 3, NUM_PAGES - 1):
        assert sorted(_bytes(told, at)) == _by_index(pages(at))


def test_parts_of_a_layer_are_shares_of_their_own() -> None:
    keys, values = _memory(NUM_PAGES, TOKENS, HEADS, DIM), _memory(NUM_PAGES, TOKENS, HEADS, DIM)
    (first, second) = _told((keys, values)).groups[0]
    assert (first.address, first.stride, first.nbytes) == (keys.data_ptr(), PART, PART)
    assert second.address == values.data_ptr()


def test_rows_of_two_parts_make_one_page() -> None:
    parts = [_memory(2 * NUM_PAGES, TOKENS // 2, HEADS, DIM) for _ in range(2)]
    assert [each.nbytes for each in _told(parts).groups[0]] == [PART, PART]


def test_rows_beyond_vllms_pages_hide_no_values() -> None:
    parts = [_memory(2 * NUM_PAGES, TOKENS, HEADS, DIM) for _ in range(2)]
    assert [each.nbytes for each in _told(parts).groups[0]] == [PART, PART]


def test_view_of_all_parts_stands_for_them() -> None:
    full = _memory(NUM_PAGES, 2 * PART)
    (share,) = _told((full[:, :PART], full[:, PART:], full)).groups[0]
    assert (share.address, share.nbytes) == (full.data_ptr(), 2 * PART)


def test_layers_that_share_their_kv_have_it_once() -> None:
    caches = {"a": BLOCKS_FIRST, "b": BLOCKS_FIRST}
    sizes = [LayerSize(name, [2 * PART]) for name in caches]
    assert len(tell_pages(caches, [sizes], NUM_PAGES).groups[0]) == 1


def test_pages_that_cannot_be_told_are_refused() -> None:
    with pytest.raises(LayoutError, match="a: no axis of .* is one of 7 pages of 100 bytes"):
        _told(BLOCKS_FIRST, 100)
    both = _memory(2, 2, TOKENS, HEADS, DIM)
    with pytest.raises(LayoutError, match="2 pages are too few to tell K from V"):
        tell_pages({"a": both}, [[LayerSize("a", [2 * PART])]], 2)


def test_layouts_of_a_page_are_told_apart_and_pools_of_any_size_are_alike() -> None:
    larger = _memory(NUM_PAGES + 5, 2, TOKENS, HEADS, DIM)
    layouts = [_told(each).layout for each in (BLOCKS_FIRST, HEADS_INSIDE, BLOCKS_INSIDE)]
    assert len(set(layouts)) == 3
    sizes = [[LayerSize("a", [2 * PART])]]
    assert tell_pages({"a": larger}, sizes, NUM_PAGES + 5).layout == layouts[0]


def test_keys_and_values_apart_may_have_fewer_pages_than_tokens() -> None:
    keys, values = (_memory(NUM_PAGES, NUM_PAGES, HEADS, DIM) for _ in range(2))
    pages = _told((keys, values), 2 * keys[0].numel())
    assert [share.address for share in pages.groups[0]] == [keys.data_ptr(), values.data_ptr()]
    assert [share.nbytes for share in pages.groups[0]] == [keys[0].numel()] * 2


def _facts(dtype: str) -> EngineFacts:
    return EngineFacts((GroupFacts(0, TOKENS, ("a",)),), 0, 1, TOKENS, dtype)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize(
    ("cache", "tokens_at"),
    [
        (torch.zeros(NUM_PAGES, 2, TOKENS, HEADS, DIM), 2),
        (torch.zeros(2, NUM_PAGES, TOKENS, HEADS, DIM), 2),
        (torch.zeros(2, NUM_PAGES, HEADS, TOKENS, DIM), 3),
        (torch.zeros(NUM_PAGES, 2, HEADS, TOKENS, DIM).transpose(2, 3), 2),
        (torch.zeros(NUM_PAGES, 2, TOKENS, HEADS, DIM).transpose(0, 1), 2),
        (torch.zeros(NUM_PAGES, TOKENS, 3 * DIM), 1),
        ([torch.zeros(NUM_PAGES, TOKENS, HEADS, DIM) for _ in "kv"], 1),
    ],
    ids=["blocks first", "keys first", "heads", "heads inside", "inside", "latents", "apart"],
)
def test_numbers_of_a_token_are_found_in_its_slot(cache: Cache, tokens_at: int, num: int) -> None:
    parts = tensors_of(cache)
    page_bytes = sum(part.nbytes for part in parts) // NUM_PAGES
    pages = tell_pages({"a": cache}, layers := [[LayerSize("a", [page_bytes])]], NUM_PAGES)
    for number, part in enumerate(parts):
        at = [1] * part.ndim
        at[tokens_at] = TOKENS
        part.copy_(torch.arange(TOKENS).view(at) + 10 * number)
        if part.ndim == 5:
            kv_axis = part.shape.index(2) if part.size(0) != 2 else 0
            part.select(kv_axis, 1).add_(10)
    pool = pages.pool(num, num * page_bytes)
    places = tell_tokens({"a": cache}, layers[0], pool, 0, _facts("float32"))
    assert places is not None
    slot = np.zeros(num * page_bytes, np.uint8)
    host = Memory(slot.ctypes.data, slot.nbytes, "host", slot)
    taken = GroupPages(range(num), [Slot(0)], 0)
    CpuDevice().make_queue(Direction.STORE).submit(pool.stage([taken], host, Direction.STORE))
    found = [
        row
        for each in places[0]
        for row in slot.view(np.float32)[each.first + each.places].tolist()
    ]
    expected = [[[10 * at + token] for token in [*range(TOKENS)] * num] for at in range(len(found))]
    assert [[sorted(set(token)) for token in part] for part in found] == expected
    assert sum(each.places.size for each in places[0]) * 4 == slot.nbytes, "every number is found"


def test_numbers_that_belong_to_no_token_are_unknown() -> None:
    state = torch.zeros(NUM_PAGES, 3, 5)
    pages = tell_pages({"a": state}, layers := [[LayerSize("a", [60])]], NUM_PAGES)
    assert tell_tokens({"a": state}, layers[0], pages.pool(1, 64), 0, _facts("float32")) is None
    quantised = torch.zeros(NUM_PAGES, TOKENS, 5, dtype=torch.uint8)
    pages = tell_pages({"a": quantised}, layers := [[LayerSize("a", [20])]], NUM_PAGES)
    for dtype, is_known in (("fp8", True), ("fp8_e5m2", True), ("nvfp4", False)):
        places = tell_tokens({"a": quantised}, layers[0], pages.pool(1, 32), 0, _facts(dtype))
        assert (places is not None) is is_known


def _beside_states(num_layers: int, behind: int = 0) -> EnginePages:
    """Return pages of attention and of states that are a byte shorter, in the same tensors.

    behind: bytes in front of a state in its page.
    """
    memory = [_memory(NUM_PAGES, 2 * PART) for _ in range(num_layers)]
    caches: dict[str, Cache] = {}
    for at, tensor in enumerate(memory):
        caches[f"attention {at}"] = tensor.view(NUM_PAGES, 2, TOKENS, HEADS * DIM)
        caches[f"state {at}"] = tensor[:, behind : 2 * PART - 1]
    groups = [
        [LayerSize(f"attention {at}", [2 * PART]) for at in range(num_layers)],
        [LayerSize(f"state {at}", [2 * PART - 1 - behind], is_state=True) for at in range(1)],
    ]
    return tell_pages(caches, groups, NUM_PAGES)


def test_states_are_in_pieces_of_whole_pages_for_direct_reads() -> None:
    pages = _beside_states(2)
    assert pages.pool(1, 4 * PART).why_not_direct
    equal = pages.in_equal_pieces()
    assert equal.pool(1, 4 * PART).why_not_direct == ""
    assert equal.groups == [pages.groups[0], pages.groups[0][:1]], "each within its page"
    assert equal.layout != pages.layout, "the bytes of a block are others"
    assert equal.in_equal_pieces() is equal


def test_groups_in_other_places_stay_in_unequal_pieces() -> None:
    pages = _beside_states(2, behind=16)
    assert pages.in_equal_pieces() is pages
