"""Blocks that ranks of one parallel size store, and ranks of another one load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.common.paged_pool import GroupPages
from kvtier.connectors.vllm.shared.pages import Cache, EnginePages, LayerSize, tell_pages
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.connectors.vllm.shared.shards import division_of, layout_of, shards_of
from kvtier.core.errors import ConfigError, LayoutError
from kvtier.core.types import BlockKey, BlockName, Slot
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import Division, opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.wrappers import Shards, ShardTier

LAYERS, TOKENS, DIM = 4, 10, 3
NUM_PAGES = 7
NUM_BLOCKS = 2
KEYS = [BlockKey(bytes([at]) * 32) for at in range(NUM_BLOCKS)]
NAMES = [BlockName(b"", 0, key) for key in KEYS]

KV = torch.Tensor
"""KV of one layer, uint8 [pages, 2, heads, tokens, dim]."""


def _packed(order: Sequence[int]) -> Callable[[int], tuple[Cache, torch.Tensor]]:
    """One tensor of pages, heads, tokens, and K beside V, with these axes in memory."""

    def make(heads: int) -> tuple[Cache, torch.Tensor]:
        sizes = (NUM_PAGES, heads, TOKENS, 2 * DIM)
        memory = torch.zeros([sizes[at] for at in order], dtype=torch.uint8)
        cache = memory.permute([order.index(at) for at in range(4)])
        return cache, cache.unflatten(3, (2, DIM)).permute(0, 3, 1, 2, 4)

    return make


def _blocks_first(heads: int) -> tuple[Cache, torch.Tensor]:
    cache = torch.zeros((NUM_PAGES, 2, TOKENS, heads, DIM), dtype=torch.uint8)
    return cache, cache.transpose(2, 3)


def _keys_first(heads: int) -> tuple[Cache, torch.Tensor]:
    cache = torch.zeros((2, NUM_PAGES, TOKENS, heads, DIM), dtype=torch.uint8)
    return cache, cache.transpose(0, 1).transpose(2, 3)


def _keys_first_heads_inside(heads: int) -> tuple[Cache, torch.Tensor]:
    cache = torch.zeros((2, NUM_PAGES, heads, TOKENS, DIM), dtype=torch.uint8)
    return cache, cache.transpose(0, 1)


def _small_rows(heads: int) -> tuple[Cache, torch.Tensor]:
    """A page of the kernel has half of the tokens."""
    cache = torch.zeros((2 * NUM_PAGES, 2, TOKENS // 2, heads, DIM), dtype=torch.uint8)
    halves = cache.unflatten(0, (NUM_PAGES, 2))  # page, half, 2, tokens, heads, dim
    return cache, halves.permute(0, 2, 4, 1, 3, 5)


def _two_tensors(heads: int) -> tuple[Cache, torch.Tensor]:
    memory = torch.zeros((2, NUM_PAGES, TOKENS, heads, DIM), dtype=torch.uint8)
    return (memory[0], memory[1]), memory.transpose(0, 1).transpose(2, 3)


def _latents(heads: int) -> tuple[Cache, torch.Tensor]:
    assert heads == 1, "every rank has all of them"
    cache = torch.zeros((NUM_PAGES, TOKENS, 2 * DIM), dtype=torch.uint8)
    return cache, cache.unflatten(2, (2, 1, DIM)).permute(0, 2, 3, 1, 4)


KINDS: dict[str, Callable[[int], tuple[Cache, torch.Tensor]]] = {
    "heads in pages": _packed((0, 1, 2, 3)),
    "tokens in pages": _packed((0, 2, 1, 3)),
    "pages in heads": _packed((1, 0, 2, 3)),
    "blocks first": _blocks_first,
    "keys first": _keys_first,
    "keys first, heads inside": _keys_first_heads_inside,
    "small rows": _small_rows,
    "two tensors": _two_tensors,
    "layers in pages": _packed((0, 1, 2, 3)),  # of all layers together, see _made
}
LATENTS = {"latents": _latents}


def _made(kind: str, heads: int, num_layers: int) -> list[tuple[Cache, torch.Tensor]]:
    """Return the KV of some layers."""
    if kind != "layers in pages":
        return [(KINDS | LATENTS)[kind](heads) for _ in range(num_layers)]
    sizes = (NUM_PAGES, num_layers, heads, TOKENS, 2 * DIM)
    caches = torch.zeros(sizes, dtype=torch.uint8).unbind(1)
    return [(cache, cache.unflatten(3, (2, DIM)).permute(0, 3, 1, 2, 4)) for cache in caches]


class Rank:
    """Pages and host memory of one rank, over a store."""

    def __init__(
        self,
        kind: str,
        division: Division,
        layers: Sequence[int],
        pages_per_block: int,
        shelf: StoredBlocks,
    ) -> None:
        self.division, self.layers, self.per_block = division, layers, pages_per_block
        made = _made(kind, division.num_own, len(layers))
        self.views = [view for _, view in made]
        names = [f"model.layers.{layer}.attn" for layer in layers]
        self.caches = dict(zip(names, (cache for cache, _ in made), strict=True))
        page_bytes = 2 * TOKENS * division.num_own * DIM
        self.sizes = [LayerSize(name, [page_bytes]) for name in names]
        self.pages: EnginePages = tell_pages(self.caches, [self.sizes], NUM_PAGES)
        self.slot_bytes = page_bytes * len(layers) * pages_per_block + 5
        self.pool = self.pages.pool(pages_per_block, self.slot_bytes)
        self.host = np.zeros(NUM_BLOCKS * self.slot_bytes, np.uint8)
        self.shards = shards_of(
            self.pages, [self.sizes], self.caches, division, pages_per_block, self.slot_bytes
        )
        store = MemoryStorage(opaque(self.shards.bytes_per_shard), 10**6, shelf)
        self.tier = ShardTier(store, self.shards)

    @property
    def _blocks(self) -> Pieces:
        begins = self.host.ctypes.data + self.slot_bytes * np.arange(NUM_BLOCKS)
        return Pieces.whole(begins, self.slot_bytes)

    def _own(self, layer: int) -> slice:
        first = self.division.first_own
        return slice(first, first + self.division.num_own)

    def _copy(self, num_pages: int, direction: Direction) -> None:
        slots = [Slot(at) for at in range(NUM_BLOCKS)]
        pages = GroupPages(list(range(num_pages)), slots, 0)
        host = Memory(self.host.ctypes.data, self.host.nbytes, "host", self.host)
        CpuDevice(threads=1).copy(self.pool.stage([pages], host, direction), direction)

    def store(self, kv: Sequence[KV]) -> list[Outcome]:
        num = NUM_BLOCKS * self.per_block
        for layer, view in zip(self.layers, self.views, strict=True):
            own = kv[layer][:num, :, self._own(layer)]
            view[:num] = own.unflatten(3, view.shape[3:-1]) if view.ndim > 5 else own
        self._copy(num, Direction.STORE)
        return self.tier.put(NAMES, self._blocks, 1.0)

    def load(self, kv: Sequence[KV]) -> list[Outcome]:
        """Load all blocks, and compare the found ones with ``kv``."""
        found = self.tier.find(KEYS, 1.0)
        assert found == self.tier.get(KEYS, self._blocks, 1.0)
        self._copy(NUM_BLOCKS * self.per_block, Direction.LOAD)
        for at in (at for at, each in enumerate(found) if each is Outcome.THERE):
            some = slice(at * self.per_block, (at + 1) * self.per_block)
            for layer, view in zip(self.layers, self.views, strict=True):
                there = view[some].flatten(3, -2) if view.ndim > 5 else view[some]
                assert torch.equal(there, kv[layer][some, :, self._own(layer)]), "wrong bytes"
        return found


def _engine(
    kind: str,
    shelf: StoredBlocks,
    heads: int,
    tp: int,
    pp: int,
    shards: int,
    stages: int,
    pages_per_block: int,
) -> list[Rank]:
    layers = LAYERS // pp
    return [
        Rank(
            kind,
            Division(
                heads, rank, tp, heads // gcd(heads, shards), LAYERS // stages if stages else 0
            ),
            range(stage * layers, (stage + 1) * layers),
            pages_per_block,
            shelf,
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def _kv(seed: int, heads: int) -> list[KV]:
    made = torch.Generator().manual_seed(seed)
    shape = (NUM_PAGES, 2, heads, TOKENS, DIM)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=made) for _ in range(LAYERS)]


def _sizes(heads: int, shards: int) -> list[int]:
    """Return the tensor parallel sizes of engines that share shards of so many KV heads."""
    return [
        tp
        for tp in (1, 2, 3, 4, 6, 8)
        if (heads % tp == 0 or tp % heads == 0) and gcd(heads, shards) % min(tp, heads) == 0
    ]


@given(st.data())
def test_every_size_loads_what_every_other_size_has_stored(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*KINDS, *LATENTS]))
    heads = data.draw(st.sampled_from([1, 2, 4, 6, 8] if kind in KINDS else [1]))
    shards = data.draw(st.sampled_from([1, 2, 4, 24]))
    stages, per_block = data.draw(st.sampled_from([1, 4])), data.draw(st.integers(1, 2))
    pps = [1] if stages == 1 else [1, 2, 4]
    shelf, kv = StoredBlocks(), _kv(data.draw(st.integers(0, 9)), heads)

    def engine() -> list[Rank]:
        tp, pp = data.draw(st.sampled_from(_sizes(heads, shards))), data.draw(st.sampled_from(pps))
        return _engine(kind, shelf, heads, tp, pp, shards, stages, per_block)

    for rank in engine():
        assert rank.store(kv) == [Outcome.THERE] * NUM_BLOCKS
    num = len(shelf.blocks)
    assert num == NUM_BLOCKS * gcd(heads, shards) * stages, "each part is stored once"
    for rank in engine():
        assert rank.load(kv) == [Outcome.THERE] * NUM_BLOCKS
        rank.store(kv)
    assert len(shelf.blocks) == num, "there is nothing new in it"


@given(st.data())
def test_engines_that_differ_in_layout_never_load_wrong_bytes(data: st.DataObject) -> None:
    shelf, kv = StoredBlocks(), _kv(1, 4)
    for rank in _engine(data.draw(st.sampled_from([*KINDS])), shelf, 4, 2, 1, 4, 1, 1):
        rank.store(kv)
    kind, shards = data.draw(st.sampled_from([*KINDS])), data.draw(st.sampled_from([2, 4]))
    for rank in _engine(kind, shelf, 4, 1, 1, shards, 1, 1):
        rank.load(kv)


def _config(heads: int = 8, layers: int = 32, rank: int = 0, **parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, **sizes),
        model_config=SimpleNamespace(
            use_mla=False,
            get_total_num_kv_heads=lambda: heads,
            get_total_num_hidden_layers=lambda: layers,
        ),
    )


def _settings(**settings: int) -> VllmSettings:
    return VllmSettings.read({"storage": "valkey://cache.example", **settings})


def test_division_follows_the_ranks_of_an_engine() -> None:
    settings = _settings(storage_shards=8, storage_stages=4)
    config = _config(rank=5, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert division_of(config, settings) == Division(8, 1, 4, 1, 8)
    config.model_config.use_mla = True
    assert division_of(config, settings) == Division(1, 1, 4, 1, 8)
    assert not division_of(config, settings).is_writer, "the first rank has the same latents"


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        (
            _config(heads=12, tensor_parallel_size=3),
            {"storage_shards": 8},
            "8 shards of 12 KV heads are 4, and no whole number on each of 3 ranks; use a multiple",
        ),
        (
            _config(tensor_parallel_size=2, decode_context_parallel_size=2),
            {"storage_shards": 8},
            "under context parallelism a rank has tokens of a block",
        ),
        (
            _config(layers=61),
            {"storage_shards": 1, "storage_stages": 2},
            "61 layers can't be cut into 2 equal stages",
        ),
    ],
)
def test_engine_that_cant_be_cut_is_refused_with_one_sentence(
    config: Any, settings: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        division_of(config, _settings(**settings))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"storage_shards": -1}, "storage_shards: -1 is below 0"),
        ({"storage_shards": 8, "storage": ""}, "there is no storage here"),
        ({"storage_stages": 2}, "storage_stages needs storage_shards"),
    ],
)
def test_setting_without_effect_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        VllmSettings.read({"storage": "valkey://cache.example", **settings})


def test_heads_that_look_like_tokens_are_refused() -> None:
    with pytest.raises(LayoutError, match="the axis of 10 KV heads can't be identified"):
        Rank("blocks first", Division(TOKENS, 0, 1, 1), [0], 1, StoredBlocks())


def test_stages_of_unequal_size_are_refused() -> None:
    with pytest.raises(LayoutError, match="shards have unequal sizes"):
        Rank("blocks first", Division(2, 0, 1, 1, 2), [0, 1, 2], 1, StoredBlocks())


def test_rank_of_one_shard_has_it_in_one_piece() -> None:
    """An engine of the largest size has no cost for smaller sizes."""
    for kind in ("heads in pages", "tokens in pages", "keys first"):
        (rank, *_) = _engine(kind, StoredBlocks(), 8, 8, 1, 8, 1, 2)
        assert rank.shards.offsets.tolist() == [[0]], kind


def test_layers_that_share_their_kv_are_stored_once() -> None:
    cache, _ = _blocks_first(2)
    layers = [LayerSize(f"model.layers.{at}.attn", [4 * TOKENS * DIM]) for at in range(2)]
    caches = {layer.name: cache for layer in layers}
    pages = tell_pages(caches, [layers], NUM_PAGES)
    shards = shards_of(pages, [layers], caches, Division(2, 0, 1, 1), 1, 4096)
    assert shards.bytes_per_shard == 2 * TOKENS * DIM


def _shards_of_groups(heads: int, *num_layers: int, changed: int = 0) -> Shards:
    """Return the shards of KV groups with so many layers, whose n-th layers share their memory."""
    memory = [_blocks_first(heads)[0] for _ in range(max(num_layers))]
    other = _blocks_first(heads + changed)[0]
    page_bytes = 2 * TOKENS * heads * DIM
    groups = [
        [LayerSize(f"model.layers.{10 * group + at}.attn", [page_bytes]) for at in range(num)]
        for group, num in enumerate(num_layers)
    ]
    caches: dict[str, Cache] = {
        layer.name: other if changed and group else memory[at]
        for group, layers in enumerate(groups)
        for at, layer in enumerate(layers)
    }
    pages = tell_pages(caches, groups, NUM_PAGES)
    return shards_of(pages, groups, caches, Division(4, 0, 4 // heads, 1), 1, 4096)


def test_blocks_of_several_groups_are_cut_alike() -> None:
    """A group with fewer layers leaves the end of a shard unused."""
    alone, unequal = _shards_of_groups(2, 3), _shards_of_groups(2, 3, 2)
    assert np.array_equal(alone.offsets, unequal.offsets)
    assert alone.bytes_per_shard == unequal.bytes_per_shard
    assert not set(alone.names) & set(unequal.names), "other layers are in them"
    assert set(_shards_of_groups(4, 3, 2).names) > set(unequal.names), "of any number of ranks"


def test_groups_with_states_beside_heads_are_refused() -> None:
    cache, _ = _blocks_first(2)
    state = torch.zeros((NUM_PAGES, 40), dtype=torch.uint8)
    groups = [[LayerSize("a", [4 * TOKENS * DIM])], [LayerSize("b", [40], is_state=True)]]
    caches: dict[str, Cache] = {"a": cache, "b": state}
    pages = tell_pages(caches, groups, NUM_PAGES)
    with pytest.raises(LayoutError, match="b keeps a recurrent state, which has no KV heads"):
        shards_of(pages, groups, caches, Division(2, 0, 1, 1), 1, 4096)


def test_layout_says_nothing_of_the_ranks() -> None:
    told = set()
    for tp in (1, 2, 8):
        (rank, *_) = _engine("tokens in pages", StoredBlocks(), 8, tp, 1, 8, 1, 1)
        told.add(layout_of(rank.sizes, rank.caches, NUM_PAGES, rank.division))
    (rank, *_) = _engine("heads in pages", StoredBlocks(), 8, 1, 1, 4, 1, 1)
    other = layout_of(rank.sizes, rank.caches, NUM_PAGES, rank.division)
    assert len(told) == 1
    assert other not in told
