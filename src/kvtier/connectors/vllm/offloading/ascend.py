"""vllm-ascend's KV caches in the form that vLLM's offloading interface takes.

vLLM's own connector takes one tensor per layer, with K and V of a page side by side. vllm-ascend
keeps them, and the scales of quantised KV, in tensors of their own:

    layer   (keys [num_blocks, block_size, heads, dim], values [the same], ...)

vllm-ascend's own connector passes them on, but not in every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvtier.connectors.common.paged_pool import PoolShare
from kvtier.connectors.vllm.shared.pages import Cache, EnginePages, layer_sizes, tell_pages
from kvtier.core.errors import LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def split_caches(
    kv_caches: Mapping[str, Cache], config: KVCacheConfig, group_ids: Sequence[int]
) -> CanonicalKVCaches | None:
    """Return vLLM's canonical form of ``kv_caches``, with one tensor per share of a page.

    No memory is copied.

    Args:
        kv_caches: KV of each layer, by name.
        config: Sizes of the layers' pages.
        group_ids: Places in ``config.kv_cache_groups`` of the groups to offload.

    Returns:
        None if every layer is one tensor: vLLM's own connector knows its layout better.

    Raises:
        LayoutError: A layer's tensors are not whole pages, or a page is not one run of bytes.
    """
    groups = [config.kv_cache_groups[each] for each in group_ids]
    names = [name for group in groups for name in group.layer_names]
    if all(isinstance(kv_caches[name], torch.Tensor) for name in names):
        return None
    for name in names:
        # Keys of this connector's blocks do not depend on the order of a page's axes.
        if not all(part[0].is_contiguous() for part in kv_caches[name]):
            raise LayoutError(f"{name}: a page is not one run of bytes in the order of its axes")
    pages = tell_pages(kv_caches, layer_sizes(groups), config.num_blocks)
    places: dict[PoolShare, int] = {}
    refs = [
        [
            CanonicalKVCacheRef(places.setdefault(share, len(places)), share.nbytes)
            for share in shares
        ]
        for shares in pages.groups
    ]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(_view(share, pages), share.nbytes) for share in places], refs
    )


def _view(share: PoolShare, pages: EnginePages) -> torch.Tensor:
    """Return int8 [num_pages, bytes of the share], a view of the memory of all pages."""
    for tensor in pages.tensors:
        storage = tensor.untyped_storage()
        if 0 <= (begin := share.address - storage.data_ptr()) < storage.nbytes():
            memory = torch.empty(0, dtype=torch.int8, device=tensor.device)
            return memory.set_(storage, begin, (pages.num_pages, share.nbytes), (share.stride, 1))
    raise AssertionError("a share outside the engine's tensors")
