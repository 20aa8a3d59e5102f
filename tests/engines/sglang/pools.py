"""SGLang's own host pools on the CPU, small, with distinct bytes."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvtier.connectors.sglang.copies.cpu_copies import POOLS, class_name

NUM_PAGES = 12
PAGE = 16
LAYERS = 3
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def host_pool(kind: str, layout: str, dtype: torch.dtype = torch.float32, heads: int = 2) -> Any:
    """Return a host pool whose bytes follow from a seed. kind: "mha" or "mla".

    heads: KV heads of this rank, for "mha".
    """
    size = (NUM_PAGES - 2) * PAGE
    common = {"size": size, "page_size": PAGE, "dtype": dtype, "layer_num": LAYERS}
    common |= {"device": "cpu", "enable_memory_saver": False}
    if kind == "mha":
        device = MHATokenToKVPool(head_num=heads, head_dim=8, **common)
    else:
        device = MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
    host = resolve_name(next(class_name(each) for each in POOLS if each.startswith(kind)))
    buffers = getattr(device, f"_{kind}_buffer_info", None)
    if buffers is None:  # before SGLang 0.5.23
        pool = host(device, 1.1, 0, PAGE, layout, pin_memory=False)
    else:
        own = {"device_capacity_tokens": size, "start_layer": 0, "end_layer": LAYERS}
        own |= {"target_layer_num": LAYERS} if kind == "mla" else {}
        pool = host(buffers(), 1.1, 0, PAGE, layout, pin_memory=False, **own)
    pool.device_pool = device  # its tensors are the copies' other side
    fill(pool, 0)
    return pool


def fill(pool: Any, seed: int) -> None:
    """Fill all of a pool's pages with random bytes."""
    torch.manual_seed(seed)
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def tokens(*pages: int) -> torch.Tensor:
    """Return the host indices of the tokens of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def kv_of(pool: Any) -> torch.Tensor:
    """Return a view: uint8 [pages, layers, 2, tokens, heads, bytes], for any layout.

    MLA's latents are one head, and one entry in place of K and V.
    """
    kv = pool.kv_buffer if pool.kv_buffer.shape[0] == 2 else pool.kv_buffer.unsqueeze(0)
    raw = kv.view(torch.uint8)
    if pool.layout == "layer_first":
        return raw.unflatten(2, (-1, PAGE)).permute(2, 1, 0, 3, 4, 5)
    if pool.layout == "page_first":
        return raw.unflatten(1, (-1, PAGE)).permute(1, 3, 0, 2, 4, 5)
    if pool.layout == "page_first_direct":
        return raw.permute(1, 2, 0, 3, 4, 5)
    return raw.permute(1, 4, 0, 3, 2, 5)  # page_head


def content(pool: Any, page: int) -> torch.Tensor:
    """Return a copy of a page's bytes, as SGLang reads it."""
    return pool.get_data_page(page * PAGE, flat=True).clone().view(torch.uint8)
