"""Labels and keys: what names a block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core import hot
from kvtier.core.errors import ConfigError
from kvtier.core.keys import (
    Namespace,
    PackedKeys,
    grid_labels,
    keys_along,
    next_key,
    next_keys,
    select_keys,
    token_labels,
    view_labels,
)
from kvtier.core.reference.tokens import pack_tokens as reference_pack_tokens
from kvtier.core.types import BlockKey, Label

NS = b"namespace"

NAMESPACE = Namespace("model", "main", "float32", "abc", 4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 9))
def test_labels_are_the_tokens_of_the_full_blocks(ids: list[int], block_size: int) -> None:
    labels = token_labels(ids, block_size)
    assert len(labels) == len(ids) // block_size
    back = np.frombuffer(b"".join(labels), "<u4").tolist()
    assert back == ids[: len(labels) * block_size]


@given(tokens, tokens)
def test_labels_of_a_prefix_are_a_prefix_of_the_labels(ids: list[int], more: list[int]) -> None:
    labels = token_labels(ids, 4)
    assert token_labels(ids + more, 4)[: len(labels)] == labels


@given(st.binary(max_size=40), tokens, st.integers(1, 300), st.integers(1, 3))
def test_a_chain_of_keys_is_one_hash_after_the_other(
    before: bytes, ids: list[int], block_size: int, per_chunk: int
) -> None:
    """Whoever hashes, whatever form the labels have, and however long they are."""
    ids = ids * (1 + 3 * block_size * per_chunk // max(1, len(ids)))
    labels = grid_labels(ids, block_size, block_size * per_chunk)
    expected = list(accumulate(labels, next_key, initial=before))[1:]
    assert next_keys(before, labels) == next_keys(before, list(labels)) == expected
    assert next_keys(before, labels[1:]) == (next_keys(before, list(labels[1:])))


@given(st.integers(1, 9), st.lists(st.integers(0, 2**31 - 1), max_size=60))
def test_keys_follow_from_tokens_as_they_lie_in_memory(block_size: int, ids: list[int]) -> None:
    labels = view_labels(np.array(ids, np.int64), block_size)
    assert next_keys(b"k", labels) == next_keys(b"k", token_labels(ids, block_size))


@given(st.lists(st.integers(0, 9), max_size=40), st.data())
def test_keys_that_were_computed_ahead_are_those_that_would_be_now(
    ids: list[int], data: st.DataObject
) -> None:
    labels = data.draw(
        st.sampled_from(
            [token_labels(ids, 2), grid_labels(ids, 2, 8), view_labels(array("i", ids), 2)]
        )
    )
    first, num = data.draw(st.tuples(st.integers(0, 25), st.integers(0, 25)))
    expected = [NS, *next_keys(NS, list(labels))]
    before = expected[min(first, len(labels))]
    assert labels.computed_keys(NS) is None
    assert keys_along(NS, labels, first, num, before) == expected[1:][first : first + num]
    labels.compute_keys(NS)
    part: Any = labels[first:][:num]
    assert part.computed_keys(NS) == expected[1:][first : first + num]
    assert part.computed_keys(b"another") is None
    assert keys_along(NS, labels, first, num, b"not asked for") == part.computed_keys(NS)


def test_partial_block_has_no_label() -> None:
    assert token_labels([1, 2, 3], 4) == []
    assert len(token_labels([1, 2, 3, 4, 5], 4)) == 1
    assert token_labels([], 4) == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, ">i8"])
def test_labels_do_not_depend_on_the_array_they_come_from(dtype: str) -> None:
    ids = [0, 1, 77, 2**31 - 1]
    assert token_labels(np.array(ids, dtype), 2) == token_labels(ids, 2)
    assert token_labels(np.array(ids * 2, dtype)[::2], 2) == token_labels((ids * 2)[::2], 2)


@pytest.mark.parametrize("ids", [[-1], [2**32], [0, -100, 5], [2**70], [-(2**70)]])
def test_token_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"0 \.\. 2\*\*32 - 1"):
        token_labels(ids, 1)


def test_token_ids_that_are_no_integers_are_refused() -> None:
    for ids in (
        np.array([1.5, 2.0]),
        np.array([[1, 2], [3, 4]]),
        np.array(["a"]),
        np.array([True]),
    ):
        with pytest.raises(ConfigError, match="token ids"):
            token_labels(ids, 1)


@given(tokens, st.integers(1, 9))
def test_labels_over_an_array_are_those_of_its_copy(ids: list[int], block_size: int) -> None:
    labels = view_labels(np.array(ids, np.int64), block_size)
    assert labels == token_labels(ids, block_size)
    assert labels[1:] == token_labels(ids, block_size)[1:]


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_labels_are_read_like_a_list(ids: list[int], data: st.DataObject) -> None:
    labels = data.draw(st.sampled_from([token_labels(ids, 2), grid_labels(ids, 2, 6)]))
    plain = list(labels)
    ends = st.none() | st.integers(-20, 20)
    part = slice(data.draw(ends), data.draw(ends), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert list(labels[part]) == plain[part]
    assert labels[part] == plain[part]
    assert [labels[at] for at in range(-len(plain), len(plain))] == plain + plain
    for outside in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError, match="full blocks"):
            labels[outside]
    assert labels != [*plain, b"x"]
    assert labels != "no labels"


@given(
    st.lists(st.integers(-(2**33), 2**33) | st.booleans(), max_size=20)
    | st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.sampled_from([list, tuple, "i", "I", "q", "Q", "h", "d", np.int32, np.uint64, ">i8", set]),
)
def test_native_packing_and_its_twin_agree(ids: list[int], kind: Any) -> None:
    try:
        given = array(kind, ids) if isinstance(kind, str) and len(kind) == 1 else None
        if given is None:
            made = kind(ids) if kind in (list, tuple, set) else np.array(ids, kind)
        else:
            made = given
    except OverflowError:
        return  # no such array
    packed = reference_pack_tokens(made)
    if hot.NATIVE:
        assert hot.pack_tokens(made) == packed
    if packed is not None:
        assert np.frombuffer(packed, "<u4").tolist() == list(made)


# -- labels on a grid of chunks --------------------------------------------------------------------

few_tokens = st.lists(st.integers(0, 1), max_size=30)


@given(few_tokens, st.sampled_from([(2, 2), (2, 4), (1, 3), (2, 8)]))
def test_first_label_of_a_chunk_is_the_whole_chunk(ids: list[int], sizes: tuple[int, int]) -> None:
    block_size, chunk_tokens = sizes
    labels, plain = grid_labels(ids, *sizes), token_labels(ids, block_size)
    per_chunk = chunk_tokens // block_size
    assert len(labels) == len(ids) // chunk_tokens * per_chunk
    for position, label in enumerate(labels):
        if position % per_chunk == 0:
            assert label == b"".join(plain[position : position + per_chunk])
        else:
            assert label == plain[position]


@given(few_tokens, few_tokens)
def test_blocks_on_a_grid_are_shared_chunk_by_chunk(one: list[int], other: list[int]) -> None:
    pairs = zip(grid_labels(one, 2, 6), grid_labels(other, 2, 6), strict=False)
    num_shared = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if num_shared is None:
        num_shared = min(len(one), len(other)) // 6 * 3
    assert num_shared % 3 == 0
    assert one[: num_shared * 2] == other[: num_shared * 2]


def test_chunk_is_a_whole_number_of_blocks() -> None:
    with pytest.raises(AssertionError, match="whole number of blocks"):
        grid_labels([1, 2, 3], 2, 3)


# -- keys ------------------------------------------------------------------------------------------


def keys_of(namespace: Namespace, labels: Sequence[Label]) -> list[BlockKey]:
    """The keys of a prompt's blocks, each from the one before."""
    keys = accumulate(labels, next_key, initial=namespace.digest)
    return [BlockKey(key) for key in islice(keys, 1, None)]


@given(tokens, tokens)
def test_keys_of_a_prefix_are_the_same(ids: list[int], more: list[int]) -> None:
    short, long = token_labels(ids, 4), token_labels(ids + more, 4)
    assert keys_of(NAMESPACE, short) == keys_of(NAMESPACE, long)[: len(short)]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=24), st.data())
def test_key_names_the_whole_prefix(ids: list[int], data: st.DataObject) -> None:
    changed = list(ids)
    at = data.draw(st.integers(0, len(ids) // 4 * 4 - 1))
    changed[at] += 1
    before, after = (keys_of(NAMESPACE, token_labels(each, 4)) for each in (ids, changed))
    assert all(len(key) == 32 for key in before)
    for position in range(len(before)):
        same = before[position] == after[position]
        assert same == (position < at // 4)


def test_keys_are_the_same_in_every_process() -> None:
    """A fixed value: what is on disk today has to be found tomorrow."""
    namespace = Namespace("m", "r", "float16", "f", 2, "a", "s")
    last = keys_of(namespace, token_labels([1, 2, 3, 4], 2))[1]
    assert last.hex() == "49279caa9366ddcd25c3390c5c6b8a8ef9d098674c2ef76e9c7bde12e1df2c47"


# -- namespaces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_separates_namespaces(field: str) -> None:
    value = getattr(NAMESPACE, field)
    other = replace(NAMESPACE, **{field: value + (1 if field == "block_size" else "x")})
    assert other.digest != NAMESPACE.digest
    labels = token_labels(range(4), 4)
    assert keys_of(other, labels) != keys_of(NAMESPACE, labels)


names = st.text(max_size=6)


@given(st.tuples(names, names, names, names, names), st.data())
def test_moving_characters_between_fields_changes_the_digest(
    values: tuple[str, str, str, str, str], data: st.DataObject
) -> None:
    """The same characters in the same order, cut into fields elsewhere."""
    whole = "".join(values)
    cuts = sorted(data.draw(st.integers(0, len(whole))) for _ in range(4))
    bounds = [0, *cuts, len(whole)]
    moved = tuple(whole[a:b] for a, b in pairwise(bounds))

    def digest(model: str, revision: str, dtype: str, adapter: str, salt: str) -> bytes:
        return Namespace(model, revision, dtype, "layout", 16, adapter, salt).digest

    assert (digest(*values) == digest(*moved)) == (values == moved)


def test_packed_keys_are_a_sequence_of_bytes() -> None:
    listed = [bytes([number]) * 5 for number in range(9)]
    packed = PackedKeys(b"".join(listed), 5)
    assert list(packed) == listed
    assert (len(packed), packed[0], packed[-1]) == (9, listed[0], listed[-1])
    for part in (slice(2, 5), slice(None, None, 3), slice(5, 5)):
        assert list(packed[part]) == listed[part]
        assert packed[part] == PackedKeys(b"".join(listed[part]), 5)
    assert packed[:3] != packed[1:4]
    for some in (packed, listed):
        assert list(select_keys(some, [7, 0])) == [listed[7], listed[0]]
    with pytest.raises(IndexError):
        packed[9]
