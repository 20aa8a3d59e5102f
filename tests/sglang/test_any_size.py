"""Pages that SGLang's ranks of one tensor parallel size have stored, and those of another load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from kvtier.connectors.common.paged_pool import GroupPages
from kvtier.connectors.sglang.capacity import slot_bytes
from kvtier.connectors.sglang.device_pools import DevicePool, find_pools
from kvtier.connectors.sglang.pages import Pages
from kvtier.connectors.sglang.shards import device_shards, host_shards
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.remote.valkey.resp import RespConnection, command
from kvtier.tiers.wrappers import Shards, ShardTier
from kvtier.types import BlockKey, BlockName, Slot
from tests.servers import (
    BUCKET,
    ValkeyServer,
    find_binary,
    has_valkey,
    make_bucket,
    seaweed,
)
from tests.sglang.models import make_mla
from tests.sglang.pools import (
    LAYERS,
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    NUM_PAGES,
    PAGE,
    host_pool,
    kv_of,
    tokens,
)
from tests.sglang.servers import MODEL, Answer, linker, prompt, server, storage
from tests.sglang.servers import PAGE as SERVER_PAGE
from tests.sglang.test_device_pools import FULL, params
from tests.sglang.trees import Tree

KINDS = [("mha", each) for each in MHA_LAYOUTS] + [("mla", each) for each in MLA_LAYOUTS]
NUM = 3
KEYS = [BlockKey(bytes([at]) * 32) for at in range(NUM)]
NAMES = [BlockName(b"", 0, key) for key in KEYS]
SIZES = (1, 2, 4, 8)


def rank_of(rank: int, size: int, is_mla: bool, **extra: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        rank, size, 0, 1, 0, 1, is_mla, False, True, "model", extra_config=extra
    )


def own_heads(heads: int, rank: int, size: int) -> slice:
    """Return the KV heads that SGLang gives to a rank."""
    if size <= heads:
        return slice(rank * heads // size, (rank + 1) * heads // size)
    first = rank // (size // heads)
    return slice(first, first + 1)


def whole_kv(seed: int, heads: int, width: int, sides: int) -> torch.Tensor:
    """KV of pages of a whole model: uint8 [pages, layers, K and V, tokens, heads, bytes]."""
    made = torch.Generator().manual_seed(seed)
    shape = (NUM, LAYERS, sides, PAGE, heads, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)


class HostRank:
    """One of SGLang's host pools, over a store."""

    def __init__(
        self, kind: str, layout: str, heads: int, rank: int, size: int, num_shards: int
    ) -> None:
        self.own = own_heads(heads, rank, size)
        self.pool = host_pool(kind, layout, heads=self.own.stop - self.own.start)
        self.pages = Pages(self.pool)
        config = rank_of(rank, size, kind == "mla")
        self.shards = host_shards(num_shards, heads, config, self.pool, self.pages)
        self.view = kv_of(self.pool)

    def over(self, shelf: StoredBlocks) -> ShardTier:
        inner = MemoryStorage(opaque(self.shards.bytes_per_shard), 10**6, shelf)
        return ShardTier(inner, self.shards)

    def store(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> None:
        self.view[list(places)] = kv[..., self.own, :]
        done = self.over(shelf).put(NAMES, self.pages.at(tokens(*places)), 1.0)
        assert done == [Outcome.THERE] * NUM

    def load(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> list[Outcome]:
        """Load pages, and compare those that were found, and that no others have changed."""
        before = self.view.clone()
        tier = self.over(shelf)
        found = tier.find(KEYS, 1.0)
        assert found == tier.get(KEYS, self.pages.at(tokens(*places)), 1.0)
        for at, place in enumerate(places):
            if found[at] is Outcome.THERE:
                assert torch.equal(self.view[place], kv[at][..., self.own, :]), "wrong bytes"
                before[place] = self.view[place]
        assert torch.equal(self.view, before)
        return found


@st.composite
def engines(draw: st.DrawFn, heads: int, num_shards: int) -> int:
    """Return a tensor parallel size whose ranks have whole shards."""
    fits = [
        size
        for size in SIZES
        if max(size, heads) % min(size, heads) == 0
        and gcd(heads, num_shards) % min(size, heads) == 0
    ]
    return draw(st.sampled_from(fits))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_size_loads_what_every_other_size_has_stored(data: st.DataObject) -> None:
    kind, layout = data.draw(st.sampled_from(KINDS))
    heads = data.draw(st.integers(1, 8)) if kind == "mha" else 1
    num_shards = data.draw(st.sampled_from([1, 2, 4, 8, 840]))
    shelf = StoredBlocks()

    def engine() -> list[HostRank]:
        size = data.draw(engines(heads, num_shards))
        return [HostRank(kind, layout, heads, rank, size, num_shards) for rank in range(size)]

    first, second = engine(), engine()
    width, sides = first[0].view.shape[-1], first[0].view.shape[2]
    kv = whole_kv(data.draw(st.integers(0, 9)), heads, width, sides)
    for rank in first:
        rank.store(shelf, kv, (3, 1, 7))
    num = len(shelf.blocks)
    assert num == NUM * gcd(heads, num_shards), "each part is stored once"
    for rank in second:
        assert rank.load(shelf, kv, (2, 9, 5)) == [Outcome.THERE] * NUM
        rank.store(shelf, kv, (0, 4, 6))
    assert len(shelf.blocks) == num, "there is nothing new in it"


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_pools_that_differ_in_layout_or_shards_never_load_wrong_bytes(data: st.DataObject) -> None:
    shelf, kv = StoredBlocks(), whole_kv(1, 4, 32, 2)
    layouts = st.sampled_from(MHA_LAYOUTS)
    one = data.draw(layouts)
    for rank in range(2):
        HostRank("mha", one, 4, rank, 2, 4).store(shelf, kv, (3, 1, 7))
    found = HostRank("mha", data.draw(layouts), 4, 0, 1, data.draw(st.sampled_from([2, 4])))
    found.load(shelf, kv, (2, 9, 5))


def test_rank_of_one_shard_has_it_in_one_piece_per_buffer() -> None:
    """An engine of the largest size pays nothing for the others."""
    for layout in MHA_LAYOUTS:
        rank = HostRank("mha", layout, 8, 3, 8, 8)
        assert rank.shards.sizes.tolist() == rank.pages.sizes.tolist(), layout


# -- what can't be cut ---------------------------------------------------------------------------


def refused(reason: str, make: Callable[[], object], kind: type[Exception] = ConfigError) -> None:
    with pytest.raises(kind, match=reason) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_pool_whose_heads_cant_be_told_is_refused_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(pool: Any, heads: int = 2, size: int = 1) -> Shards:
        return host_shards(8, heads, rank_of(0, size, False), pool, Pages(pool))

    cut(host_pool("mha", "page_first"))
    refused(
        "a pool of 2 KV heads on each of 4 ranks", lambda: cut(host_pool("mha", "page_first"), 4, 4)
    )
    refused(
        "3 KV heads can't be shared out among 2 ranks",
        lambda: cut(host_pool("mha", "page_first", heads=1), 3, 2),
    )
    latents = host_pool("mla", "page_first")
    refused("can't be told in pages of MLATokenToKVPoolHost", lambda: cut(latents), LayoutError)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    heads_first = host_pool("mha", "page_first")
    refused("from device memory in hnd; leave it out", lambda: cut(heads_first), LayoutError)
