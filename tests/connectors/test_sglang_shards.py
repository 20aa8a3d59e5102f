"""Pages of SGLang's ranks, cut into shards by KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the engine extra")

from kvtier.connectors.sglang.shared.identity import pool_facts
from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings
from kvtier.connectors.sglang.shared.shards import PagePart, cut, num_kv_heads, refuse_several
from kvtier.core.errors import ConfigError, LayoutError
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import Division, opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.wrappers import ShardTier

NUM = 2
KEYS = [BlockKey(bytes([at]) * 32) for at in range(NUM)]
NAMES = [BlockName(b"", 0, key) for key in KEYS]
Whole = Sequence[npt.NDArray[np.uint8]]
"""Parts of pages of a whole model: uint8 [pages, rows, heads, bytes]."""


class Rank:
    """Pages of one rank, over a store.

    is_apart: each part of a page is elsewhere in memory, as in SGLang's host pools. Otherwise all
    are in one slot with bytes behind them, as in the linker's.
    """

    def __init__(
        self, whole: Whole, division: Division, is_apart: bool, shelf: StoredBlocks
    ) -> None:
        own = slice(division.first_own, division.first_own + division.num_own)
        self.wanted = [np.ascontiguousarray(each[:, :, own]) for each in whole]
        sizes = np.array([each[0].nbytes for each in self.wanted], np.int64)
        begins = np.cumsum(sizes) - sizes
        gap, end = (7, 0) if is_apart else (0, 5)
        stride = int(sizes.sum()) + gap * len(sizes) + end
        self.memory = np.zeros((NUM, stride), np.uint8)
        self.begins = begins + gap * np.arange(len(sizes))
        addresses = self.memory.ctypes.data + stride * np.arange(NUM)[:, None] + self.begins
        self.pages = Pieces(addresses.astype(np.uint64), sizes)
        num_bytes = int(sizes.sum())
        if not is_apart:
            self.pages, num_bytes = Pieces.whole(addresses[:, 0], stride), stride
        parts = [
            PagePart(int(size), each.shape[1], "order")
            for size, each in zip(sizes, self.wanted, strict=True)
        ]
        self.shards = cut(parts, division, num_bytes, begins.tolist() if is_apart else ())
        store = MemoryStorage(opaque(self.shards.bytes_per_shard), 10**6, shelf)
        self.tier = ShardTier(store, self.shards)

    def _parts(self) -> list[npt.NDArray[np.uint8]]:
        """Return the parts of all pages as they are in memory: uint8 [pages, bytes]."""
        return [
            self.memory[:, begin : begin + each[0].nbytes]
            for begin, each in zip(self.begins, self.wanted, strict=True)
        ]

    def store(self) -> None:
        for part, wanted in zip(self._parts(), self.wanted, strict=True):
            part[:] = wanted.reshape(NUM, -1)
        assert self.tier.put(NAMES, self.pages, 1.0) == [Outcome.THERE] * NUM

    def load(self) -> None:
        assert self.tier.find(KEYS, 1.0) == [Outcome.THERE] * NUM
        assert self.tier.get(KEYS, self.pages, 1.0) == [Outcome.THERE] * NUM
        for part, wanted in zip(self._parts(), self.wanted, strict=True):
            assert (part == wanted.reshape(NUM, -1)).all(), "wrong bytes"
            part[:] = 0
        assert not self.memory.any(), "bytes beside the pages have changed"


@given(st.data())
def test_every_size_loads_what_every_other_size_has_stored(data: st.DataObject) -> None:
    heads, num_shards = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 2, 4, 8, 840]))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4)
    )
    is_apart, shelf = data.draw(st.booleans()), StoredBlocks()
    made = np.random.default_rng(data.draw(st.integers(0, 9)))
    whole = [made.integers(1, 256, (NUM, rows, heads, num), np.uint8) for rows, num in shapes]

    def engine() -> list[Rank]:
        fits = [
            size
            for size in (1, 2, 3, 4, 6, 8)
            if max(size, heads) % min(size, heads) == 0
            and gcd(heads, num_shards) % min(size, heads) == 0
        ]
        size = data.draw(st.sampled_from(fits))
        return [
            Rank(whole, Division.of(num_shards, heads, rank, size), is_apart, shelf)
            for rank in range(size)
        ]

    for rank in engine():
        rank.store()
    assert len(shelf.blocks) == NUM * gcd(heads, num_shards), "each shard is stored once"
    for rank in engine():
        rank.load()


def test_rank_of_one_shard_has_it_in_a_piece_for_each_of_its_pages() -> None:
    whole = [np.ones((NUM, 6, 8, 4), np.uint8)] * 3
    for is_apart, pieces in ((True, [24] * 3), (False, [72])):
        rank = Rank(whole, Division.of(8, 8, 2, 8), is_apart, StoredBlocks())
        assert rank.shards.sizes.tolist() == pieces


def test_pages_in_another_order_have_other_shards() -> None:
    division = Division.of(2, 2, 0, 1)
    orders = [
        PagePart(48, 2, "a"),
        PagePart(48, 4, "a"),
        PagePart(48, 2, "b"),
        PagePart(96, 2, "a"),
    ]
    names = {name for order in orders for name in cut([order], division, 96).names}
    assert len(names) == 2 * len(orders)


def refused(reason: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        given()
    assert "\n" not in str(caught.value)


def test_engine_that_cant_be_cut_is_refused_with_one_sentence() -> None:
    refused("3 KV heads can't be shared out among 2 ranks", lambda: Division.of(6, 3, 0, 2))
    refused("4 shards of 6 KV heads are 2, and no whole number", lambda: Division.of(4, 6, 0, 3))
    refused(r"pages of 2 pools \(kv, swa\)", lambda: refuse_several(["kv", "swa"]))
    refused("SGLang's options, which name the model", lambda: num_kv_heads(None, False))
    assert num_kv_heads(None, True) == 1
    with pytest.raises(LayoutError, match="3 KV heads can't be identified in 40 bytes"):
        cut([PagePart(40, 1, "")], Division.of(3, 3, 0, 1), 40)


@pytest.mark.parametrize("kind", [StorageSettings, LinkerSettings])
def test_setting_is_for_stores_that_ranks_use_themselves(kind: Any) -> None:
    assert kind.read({"storage": "valkey://host", "storage_shards": 8}).storage_shards == 8
    no_store = {"disk_path": "/nvme/kv", "disk_capacity": "1MiB", "storage_shards": 8}
    refused("there is no storage here", lambda: kind.read(no_store))
    node = {"node": "/run/kvtier/node.sock", "storage_shards": 8}
    refused("there is no storage here", lambda: kind.read(node))
    below = {"storage": "valkey://host", "storage_shards": -8}
    refused("storage_shards: -8 is below 0", lambda: kind.read(below))


def test_facts_of_any_size_say_nothing_of_ranks_and_heads() -> None:
    def facts(any_size: bool = True, rank: int = 0, size: int = 1, **of_pool: object) -> bytes:
        ranks = {"tp_rank": rank, "tp_size": size, "pp_rank": 0, "pp_size": 1}
        config: Any = SimpleNamespace(**ranks, is_mla_model=False)
        known = {"dtype": "bf16", "layout": "page_first", "page_size": 64, "head_num": 8 // size}
        return pool_facts(config, "kv", SimpleNamespace(**{**known, **of_pool}), [1], any_size)

    assert len({facts(rank=rank, size=size) for size in (1, 2, 8) for rank in range(size)}) == 1
    others = [
        facts(),
        facts(any_size=False),
        facts(any_size=False, size=2),
        facts(dtype="fp16"),
        facts(layout="layer_first"),
        facts(page_size=128),
        facts(start_layer=4),
    ]
    assert len(set(others)) == len(others)
