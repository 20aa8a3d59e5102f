"""K and V apart: what vLLM's offloading interface gets on Ascend.

vLLM's own connector takes one tensor per layer, with K and V of a page side by side. vllm-ascend
keeps them, and the scales of quantized KV, in tensors of their own:

    layer   (keys [num_blocks, block_size, heads, dim], values [the same], ...)

    share   keys of page b, share values of page b, ...        each at its own address

It has a connector that says so, but not for every version of vLLM. ``split_caches`` says the same
for whoever has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvtier.errors import LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Cache = torch.Tensor | Sequence[torch.Tensor]


def split_caches(
    kv_caches: Mapping[str, Cache], config: KVCacheConfig, group_ids: Sequence[int]
) -> CanonicalKVCaches | None:
    """vLLM's canonical form of ``kv_caches``, a share per part of each layer.

    None where every layer is one tensor, which vLLM's own connector can tell better.

    kv_caches: by layer. group_ids: places in ``config.kv_cache_groups`` of the groups to offload.
    No memory is copied. Raises ``LayoutError`` where the parts are not whole pages.
    """
    groups = [config.kv_cache_groups[each] for each in group_ids]
    names = [name for group in groups for name in group.layer_names]
    if all(isinstance(kv_caches[name], torch.Tensor) for name in names):
        return None
    tensors: dict[tuple[int, int, int], CanonicalKVCacheTensor] = {}
    places: dict[tuple[int, int, int], int] = {}
    refs: list[list[CanonicalKVCacheRef]] = []
    for group in groups:
        # A group of unlike layers has a spec for each.
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        refs.append([])
        for name in group.layer_names:
            spec = specs.get(name, group.kv_cache_spec)
            for part in _parts(name, kv_caches[name], config.num_blocks, _page_bytes(spec)):
                view = part.view(config.num_blocks)
                key = (view.data_ptr(), view.stride(0), part.share_bytes)
                tensors.setdefault(key, CanonicalKVCacheTensor(view, part.share_bytes))
                place = places.setdefault(key, len(places))
                refs[-1].append(CanonicalKVCacheRef(place, part.share_bytes))
    return CanonicalKVCaches(list(tensors.values()), refs)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor whose first axis is pages. num_rows: of that axis, that make one page."""

    tensor: torch.Tensor
    num_rows: int = 1

    @property
    def row_bytes(self) -> int:
        return prod(self.tensor.shape[1:]) * self.tensor.element_size()

    @property
    def stride_bytes(self) -> int:
        """From one row to the next."""
        return self.tensor.stride(0) * self.tensor.element_size()

    @property
    def share_bytes(self) -> int:
        """Return the bytes of a page."""
        return self.row_bytes * self.num_rows

    @property
    def is_whole(self) -> bool:
        """A row is one run of bytes, and so are the rows of a page."""
        is_one_run = self.tensor[0].is_contiguous()
        return is_one_run and (self.num_rows == 1 or self.stride_bytes == self.row_bytes)

    def contains(self, other: _Part) -> bool:
        """The other shows some of the same bytes."""
        begin, their_begin = self.tensor.data_ptr(), other.tensor.data_ptr()
        return (
            self.stride_bytes == other.stride_bytes
            and self.row_bytes > other.row_bytes
            and begin <= their_begin
            and their_begin + other.row_bytes <= begin + self.row_bytes
        )

    def view(self, num_pages: int) -> torch.Tensor:
        """int8 [num_pages, share_bytes], of the same memory."""
        begin = self.tensor.storage_offset() * self.tensor.element_size()
        memory = torch.empty(0, dtype=torch.int8, device=self.tensor.device)
        return memory.set_(
            self.tensor.untyped_storage(),
            begin,
            (num_pages, self.share_bytes),
            (self.stride_bytes * self.num_rows, 1),
        )


def _page_bytes(spec: Any) -> list[int]:
    """Return what a page may have in all parts of a layer; nothing if each row is a page.

    Of recurrent layers the states are all there is. Specs of vllm-ascend's may count the scales of
    quantized KV in the page as it is allocated, and not in the one without padding.
    """
    without_padding: int | None = getattr(spec, "unpadded_page_size_bytes", None)
    return [] if without_padding is None else [without_padding, spec.page_size_bytes]


def _parts(name: str, cache: Cache, num_pages: int, page_bytes: Sequence[int]) -> list[_Part]:
    """Return the parts of a layer, without views of another part's bytes."""
    given = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    found = [_Part(each) for each in given]
    found = [each for each in found if not any(other.contains(each) for other in found)]
    num_bytes = sum(each.row_bytes for each in found)
    fitting = [each for each in page_bytes or [num_bytes] if num_bytes and each % num_bytes == 0]
    num_rows = fitting[0] // num_bytes if fitting else 0
    found = [_Part(each.tensor, num_rows) for each in found]
    shapes = ", ".join(f"{tuple(each.shape)} strides {each.stride()}" for each in given)
    if not num_rows:
        raise LayoutError(
            f"{name}: rows of {num_bytes} bytes in {shapes} don't add up to a page of "
            f"{page_bytes[0]} bytes"
        )
    for each in found:
        if each.tensor.shape[0] < num_pages * num_rows:
            raise LayoutError(f"{name}: {num_pages} pages of {num_rows} rows, but {shapes}")
        if not each.is_whole:
            raise LayoutError(f"{name}: a page is not one run of bytes in {shapes}")
    return found
