"""Locations of pages in SGLang's device pools agree with its own tensors and linkers' views."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.unified_radix_cache import fixtures

from kvtier.connectors.sglang.shared.device_pools import DevicePool, find_pools
from kvtier.core.errors import ConfigError
from tests.engines.sglang.trees import MAMBA, PAGE, SLIDING

SIZE = 8 * PAGE
COMMON = {"size": SIZE, "page_size": PAGE, "dtype": torch.float32, "device": "cpu"}
FULL = {ComponentType.FULL}


def params(**more: Any) -> Any:
    """Return SGLang's ``CacheInitParams`` with the fields that are read."""
    known = {"mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), "page_size": PAGE}
    return SimpleNamespace(**{**known, **more})


def pieces(pool: DevicePool, page: int) -> list[tuple[int, int]]:
    """Return the address and size of each piece of a page."""
    shares = [buffer.share for buffer in pool.buffers]
    return [(share.address + page * share.stride, share.nbytes) for share in shares]


def fill(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape))


def check_bytes(pool: DevicePool, by_layer: list[list[torch.Tensor]]) -> None:
    """Compare a pool's pieces with tensors. by_layer: tensors [tokens, ...] of each layer."""
    tensors = [each for layer in by_layer for each in layer]
    fill(tensors)
    for page in (0, 3, 8):
        tokens = slice(page * PAGE, (page + 1) * PAGE)
        wanted = [
            bytes(tensor[tokens].contiguous().view(torch.uint8).numpy()) for tensor in tensors
        ]
        assert [ctypes.string_at(*piece) for piece in pieces(pool, page)] == wanted
    counts = [len(layer) for layer in by_layer]
    assert pool.ends == [sum(counts[: at + 1]) for at in range(len(counts))]


def check_as_sglang(kvcache: Any, made: Any, components: set[ComponentType]) -> list[DevicePool]:
    """Check that a page has the pieces that SGLang's own linkers would copy, layer by layer."""
    group = resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=PAGE, params=made, components=components
    )
    pools = find_pools(kvcache, made, components)
    for pool in pools:
        entries = [entry for entry in group.entries if entry.indices_from_pool.value == pool.name]
        for page in (0, 2, 5):
            first = page * pool.page_size
            indices = torch.arange(first, first + pool.page_size)
            assert pool.pages(indices) == [page]
            wanted = [
                piece
                for entry in entries
                for piece in zip(*entry.get_page_buffer_meta(indices), strict=True)
            ]
            assert sorted(pieces(pool, page)) == sorted(wanted)
            for layer in range(group.num_layers):
                begin = pool.ends[layer - 1] if layer else 0
                own = pieces(pool, page)[begin : pool.ends[layer]]
                theirs = [
                    pointer
                    for entry in entries
                    if (
                        meta := entry.get_prepared_layer_range_meta(
                            entry.prepare_locations(indices), layer
                        )
                    )
                    for pointers in meta[0]
                    for pointer in pointers
                ]
                assert sorted(address for address, _ in own) == sorted(theirs)
    return pools


def test_plain_pools() -> None:
    mha = MHATokenToKVPool(head_num=2, head_dim=8, layer_num=3, enable_memory_saver=False, **COMMON)
    (pool,) = find_pools(mha, params(), FULL)
    check_bytes(pool, [list(each) for each in zip(mha.k_buffer, mha.v_buffer, strict=True)])
    mla = MLATokenToKVPool(
        kv_lora_rank=24, qk_rope_head_dim=8, layer_num=3, enable_memory_saver=False, **COMMON
    )
    (pool,) = find_pools(mla, params(), FULL)
    check_bytes(pool, [[each] for each in mla.kv_buffer])


def test_window_beside_full_attention() -> None:
    kvcache = SWAKVPool(
        size=SIZE,
        size_swa=SIZE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=SLIDING.non_full_layer_ids,
        full_attention_layer_ids=SLIDING.full_attention_layer_ids,
        device="cpu",
    )
    pools = find_pools(kvcache, params(), {ComponentType.FULL, ComponentType.SWA})
    for pool, own, layers in zip(
        pools,
        (kvcache.full_kv_pool, kvcache.swa_kv_pool),
        (SLIDING.full_attention_layer_ids, SLIDING.non_full_layer_ids),
        strict=True,
    ):
        by_layer: list[list[torch.Tensor]] = [[] for _ in range(SLIDING.num_layers)]
        for layer, k, v in zip(layers, own.k_buffer, own.v_buffer, strict=True):
            by_layer[layer] = [k, v]
        check_bytes(pool, by_layer)
    assert [pool.name for pool in pools] == ["kv", "swa"]


def test_indexer_goes_with_its_kv() -> None:
    common = {**COMMON, "page_size": 64, "size": 512, "dtype": torch.bfloat16}
    with get_parallel().override(attn_dcp_size=1):
        kvcache = DSATokenToKVPool(
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=3,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=576,
            **common,
        )
    made = params(page_size=64)
    group = resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=64, params=made, components=FULL
    )
    (pool,) = find_pools(kvcache, made, FULL)
    indices = torch.arange(3 * 64, 4 * 64)
    wanted = [
        piece
        for entry in group.entries
        for piece in zip(*entry.get_page_buffer_meta(indices), strict=True)
    ]
    assert sorted(pieces(pool, 3)) == sorted(wanted)
    assert pool.ends == [2, 4, 6]


def test_states_beside_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def latent(**given: Any) -> HybridLinearKVPool:
        return HybridLinearKVPool(**given, use_mla=True, kv_lora_rank=24, qk_rope_head_dim=8)

    monkeypatch.setattr(fixtures, "HybridLinearKVPool", latent)
    cache, allocator, _ = fixtures.build_fixture(MAMBA, tree_core_backend="python")
    pools = check_as_sglang(allocator.get_kvcache(), cache.cache_init_params, set(cache.components))
    assert [(pool.name, pool.page_size) for pool in pools] == [("kv", PAGE), ("mamba", 1)]


@pytest.mark.parametrize("beside", ["k_scale_buffer", "index_k_buffer"])
def test_pool_with_something_beside_its_kv_is_refused(beside: str) -> None:
    mha = MHATokenToKVPool(head_num=2, head_dim=8, layer_num=3, enable_memory_saver=False, **COMMON)
    setattr(mha, beside, [torch.zeros(1)])
    with pytest.raises(ConfigError, match="scales or an indexer beside it"):
        find_pools(mha, params(), FULL)
