"""Copies between SGLang's own pools on a CPU, in every layout."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import pkgutil

import torch

from kvtier.connectors.sglang.copies.cpu_copies import hooks
from tests.engines.sglang.pools import LAYERS, MHA_LAYOUTS, MLA_LAYOUTS, host_pool, tokens

SHAPES = [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]
CLASSES = {
    "mha": "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost",
    "mla": "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost",
}


def _device_buffers(pool: object) -> list[torch.Tensor]:
    names = ("device_k_buffers", "device_v_buffers", "device_kv_buffers")
    return [each for name in names for each in getattr(pool, name, ())]


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_what_went_to_host_memory_comes_back_elsewhere(kind: str, layout: str) -> None:
    pool, own = host_pool(kind, layout), hooks()
    backup = own[f"{CLASSES[kind]}.backup_from_device_all_layer"]
    load = own[f"{CLASSES[kind]}.load_to_device_per_layer"]
    torch.manual_seed(1)
    for device_buffer in _device_buffers(pool):
        device_buffer.copy_(torch.rand(device_buffer.shape))
    before = [device_buffer.clone() for device_buffer in _device_buffers(pool)]
    on_device, in_host, elsewhere = tokens(2, 4), tokens(7, 1), tokens(0, 5)
    backup(pool, None, in_host, on_device, "kernel")
    for layer in range(LAYERS):
        load(pool, None, in_host, elsewhere, layer, "kernel")
    for now, was in zip(_device_buffers(pool), before, strict=True):
        expected = was.clone()
        expected[elsewhere] = was[on_device]
        assert torch.equal(now, expected)


def test_page_in_host_memory_is_what_sglang_reads_there() -> None:
    pool = host_pool("mha", "page_first")
    backup = hooks()[f"{CLASSES['mha']}.backup_from_device_all_layer"]
    for device_buffer in _device_buffers(pool):
        device_buffer.copy_(torch.rand(device_buffer.shape))
    backup(pool, None, tokens(3), tokens(2), "kernel")
    page = pool.get_data_page(3 * pool.page_size, flat=False)
    for layer in range(LAYERS):
        assert torch.equal(page[0][:, layer], pool.device_k_buffers[layer][tokens(2)])
        assert torch.equal(page[1][:, layer], pool.device_v_buffers[layer][tokens(2)])


def test_everything_that_is_replaced_is_there() -> None:
    for name in hooks():
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(pkgutil.resolve_name(module), attribute)), name
