"""An engine's tensors as shares of pages, by KV group.

The location of a page's bytes is derived from shapes and strides, which fits the layout of every
attention backend:

    (num_pages, 2, ...)     K and V of a page side by side: one share
    (2, num_pages, ...)     all K, then all V: two shares
    (K, V, ...)             a tensor for each, as vllm-ascend has them, or MLA's two parts
    (num_pages * k, ...)    the kernel's pages are smaller than the scheduler's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from kvtier.connectors.common.paged_pool import PagedPool, PoolShare
from kvtier.connectors.common.recomputed import FLOATS, TokenPlaces
from kvtier.connectors.vllm.shared.names import EngineFacts
from kvtier.core.errors import LayoutError
from kvtier.devices import Memory

Cache = torch.Tensor | Sequence[torch.Tensor]
"""KV of one layer, as an engine registers it."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
"""Numbers that vLLM keeps as bytes, by its name for the type of KV."""


@dataclass(frozen=True, slots=True)
class EnginePages:
    """Pages of an engine on one device.

    groups: the shares of each KV group. tensors: own the memory of all shares. layout: order of a
    page's bytes; engines that differ in it must not read each other's blocks.
    """

    groups: Sequence[Sequence[PoolShare]]
    num_pages: int
    tensors: Sequence[torch.Tensor]
    layout: str = ""

    @property
    def device(self) -> str:
        """Name of the device."""
        device = self.tensors[0].device
        return device.type if device.index is None else f"{device.type}:{device.index}"

    def in_equal_pieces(self) -> EnginePages:
        """Return the pages with shares of the same sizes in all groups, as direct reads need them.

        vLLM's groups use the same tensors, and a page belongs to one group at a time. Where a group
        does not fill its pages, as states may not, the rest of a page counts as a part of it. Pages
        whose groups lie in other places are returned as they are.
        """
        longest = max(self.groups, key=len)
        largest = list(longest)
        for group in self.groups:
            for at, share in enumerate(group):
                whole = largest[at]
                if (share.address, share.stride) != (whole.address, whole.stride):
                    return self
                largest[at] = max(share, whole, key=attrgetter("nbytes"))
        groups = [largest[: len(group)] for group in self.groups]
        if groups == [list(group) for group in self.groups]:
            return self
        return replace(self, groups=groups, layout=f"{self.layout} in equal pieces")

    def pool(self, pages_per_block: int, slot_bytes: int) -> PagedPool:
        """Return the pages with the slots that their blocks are copied to."""
        kind = self.tensors[0].device.type
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        # One for each layer, or one for several: a layer is a part of it then.
        allocations = {
            storage.data_ptr(): Memory(storage.data_ptr(), storage.nbytes(), kind, storage)
            for storage in storages
        }
        return PagedPool(
            self.groups,
            self.num_pages,
            pages_per_block,
            slot_bytes,
            kind,
            self.tensors,
            list(allocations.values()),
        )


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Size of a layer's pages, as the engine's KV cache config has it.

    page_bytes: possible sizes of a page, the likeliest first. is_state: whether a page is the state
    of a recurrent layer, which has no tokens and no KV heads.
    """

    name: str
    page_bytes: Sequence[int]
    is_state: bool = False


def layer_sizes(groups: Sequence[Any]) -> list[list[LayerSize]]:
    """Return the sizes of all layers' pages, by KV group of vLLM's ``KVCacheConfig``."""
    return [
        [
            LayerSize(name, _page_bytes(spec), hasattr(spec, "shapes"))
            for name, spec in layer_specs(group).items()
        ]
        for group in groups
    ]


def layer_specs(group: Any) -> Mapping[str, Any]:
    """Return the KV cache spec of each layer; a group of unlike layers has one for each."""
    spec = group.kv_cache_spec
    apart = getattr(spec, "kv_cache_specs", {})
    return {name: apart.get(name, spec) for name in group.layer_names}


def _page_bytes(spec: object) -> list[int]:
    """Return the possible sizes of a page, the likeliest first.

    Specs of vllm-ascend's may count the scales of quantised KV in the page as it is allocated, and
    not in the one without padding.
    """
    names = ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes")
    found: list[int | None] = [getattr(spec, name, None) for name in names]
    if (shapes := getattr(spec, "shapes", None)) is not None:  # states: without padding
        kinds = zip(shapes, spec.dtypes, strict=True)  # type: ignore[attr-defined]
        found.insert(0, sum(prod(shape) * kind.itemsize for shape, kind in kinds))
    return list(dict.fromkeys(each for each in found if each))


def tell_pages(
    kv_caches: Mapping[str, Cache], groups: Sequence[Sequence[LayerSize]], num_pages: int
) -> EnginePages:
    """Return the shares of all layers of each group. No memory is copied.

    Raises ``LayoutError`` if the axis of pages of a layer is not clear.
    """
    shares, order = [], []
    tensors: list[torch.Tensor] = []
    for group in groups:
        # Layers that share their KV have it once.
        of_group: dict[PoolShare, None] = {}
        for layer in group:
            parts = tensors_of(kv_caches[layer.name])
            tensors += parts
            axis, of_layer = _shares(layer, parts, num_pages)
            of_group.update(dict.fromkeys(of_layer))
            order.append([layer.name, *(_describe(part, axis) for part in parts)])
        shares.append(list(of_group))
    layout = sha256(repr(order).encode()).hexdigest()
    return EnginePages(shares, num_pages, tensors, layout)


def tell_tokens(
    kv_caches: Mapping[str, Cache],
    layers: Sequence[LayerSize],
    pool: PagedPool,
    group: int,
    facts: EngineFacts,
) -> list[list[TokenPlaces]] | None:
    """Return where the numbers of each token of a KV group lie in a block, by layer and tensor.

    None if it is not clear for some layer. group: its position among those of ``pool``.
    """
    found: list[list[TokenPlaces]] = []
    known: dict[bytes, TokenPlaces] = {}
    for layer in layers:
        parts = tensors_of(kv_caches[layer.name])
        try:
            axis, num_rows = page_rows(layer, parts, pool.num_pages)
        except LayoutError:
            return None
        found.append([])
        for part in parts:
            places = _token_places(part, axis, num_rows, pool, group, facts)
            if places is None:
                return None
            alike = known.setdefault(places.places.tobytes(), places)
            found[-1].append(replace(places, places=alike.places))
    return found


def _token_places(
    part: torch.Tensor, axis: int, num_rows: int, pool: PagedPool, group: int, facts: EngineFacts
) -> TokenPlaces | None:
    """Return the places of one tensor's numbers. axis, num_rows: see ``page_rows``.

    Beside pages and tokens a tensor has an axis of a head's content, the last one, and mostly one
    of heads. A fifth one is that of K and V, next to that of pages.
    """
    num_tokens = facts.groups[group].tokens_per_page
    apart = [1 - axis] if part.ndim == 5 else []
    others = [at for at in range(part.ndim) if at not in (axis, *apart)]
    tokens = next((at for at in others[:-1] if part.size(at) * num_rows == num_tokens), None)
    dtype = FP8.get(facts.dtype, part.dtype) if part.dtype is torch.uint8 else part.dtype
    if dtype not in FLOATS or tokens is None:
        return None
    others.remove(tokens)
    offsets: Any = np.zeros((), np.int64)
    for at in range(part.ndim):
        num = num_rows if at == axis else part.size(at)
        offsets = np.add.outer(offsets, np.arange(num) * part.stride(at) * dtype.itemsize)
    by_token = offsets.transpose(*apart, axis, tokens, *others)
    addresses = part.data_ptr() + by_token.reshape(2 if apart else 1, num_tokens, -1)
    places = pool.places(group, addresses)
    if places is None:
        return None
    of_block = np.concatenate(list(places // dtype.itemsize), axis=1)
    first = int(of_block.min())
    return TokenPlaces(dtype, first, (of_block - first).astype(np.int32))


def _describe(part: torch.Tensor, axis: int) -> object:
    """Return the order of a page's bytes in a part, whatever the number of pages."""
    inner = [at for at in range(part.ndim) if at != axis]
    by_stride = sorted(inner, key=part.stride)
    return str(part.dtype), [(at, part.size(at)) for at in by_stride]


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """Return the tensors of one layer."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _shares(
    layer: LayerSize, parts: Sequence[torch.Tensor], num_pages: int
) -> tuple[int, list[PoolShare]]:
    """Return the axis of pages, and the shares of one layer.

    Neighbours are merged, and views of another part's bytes left out.
    """
    axis, num_rows = page_rows(layer, parts, num_pages)
    runs = _merged([run for part in parts for run in _rows(part, axis)])
    return axis, _merged(_of_pages(runs, num_rows))


def page_rows(layer: LayerSize, parts: Sequence[torch.Tensor], num_pages: int) -> tuple[int, int]:
    """Return the axis of pages of a layer's tensors, and how many of its rows make a page.

    Separate tensors for K and V have pages as their first axis.

    Raises ``LayoutError`` if no axis, or more than one, can be that of the pages.
    """
    axes = (0, 1) if len(parts) == 1 else (0,)
    for page_bytes in layer.page_bytes:
        told = [
            (axis, num_rows)
            for axis in axes
            if (num_rows := _num_rows(axis, parts, num_pages, page_bytes))
        ]
        if len(told) > 1:
            raise LayoutError(f"{layer.name}: {num_pages} pages are too few to tell K from V")
        if told:
            return told[0]
    shapes = ", ".join(f"{tuple(part.shape)} strides {part.stride()}" for part in parts)
    raise LayoutError(
        f"{layer.name}: no axis of {shapes} is one of {num_pages} pages of "
        f"{' or '.join(map(str, layer.page_bytes))} bytes"
    )


def _num_rows(axis: int, parts: Sequence[torch.Tensor], num_pages: int, page_bytes: int) -> int:
    """Return how many rows make a page if pages are along ``axis`` of every part; 0 if not."""
    if any(part.ndim <= axis or part.size(axis) < num_pages for part in parts):
        return 0
    runs = _merged([run for part in parts for run in _rows(part, axis)])
    num_rows, rest = divmod(page_bytes, sum(run.nbytes for run in runs))
    if rest or any(part.size(axis) < num_pages * num_rows for part in parts):
        return 0
    return num_rows


def row_runs(part: torch.Tensor, axis: int, num_rows: int) -> list[PoolShare]:
    """Return the runs of bytes of a page along ``axis``, in no order."""
    return _of_pages(_rows(part, axis), num_rows)


def _of_pages(runs: Sequence[PoolShare], num_rows: int) -> list[PoolShare]:
    """Return the runs of rows as those of pages of so many rows."""
    return [
        PoolShare(run.address + row * run.stride, run.stride * num_rows, run.nbytes)
        for run in runs
        for row in range(num_rows)
    ]


def _rows(part: torch.Tensor, axis: int) -> list[PoolShare]:
    """Return the runs of bytes of one row along ``axis``, as shares whose pages are rows."""
    item = part.element_size()
    inner = [(part.stride(at), part.size(at)) for at in range(part.ndim) if at != axis]
    inner = sorted((stride, size) for stride, size in inner if size > 1)
    run = 1
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    starts = (
        sum(stride * place for (stride, _), place in zip(inner, places, strict=True))
        for places in product(*(range(size) for _, size in inner))
    )
    stride = part.stride(axis) * item
    return [
        PoolShare(part.data_ptr() + start * item, stride, run * item) for start in sorted(starts)
    ]


def _merged(shares: Sequence[PoolShare]) -> list[PoolShare]:
    """Return shares without those inside others; neighbours within a row are one."""
    found: list[PoolShare] = []
    order = {share: at for at, share in reversed(list(enumerate(shares)))}
    for each in sorted(order, key=lambda share: (share.stride, share.address, -share.nbytes)):
        last = found[-1] if found else None
        if last is not None and last.stride == each.stride:
            begin, end = last.address, last.address + last.nbytes
            if each.address + each.nbytes <= end:
                continue
            if each.address == end and last.nbytes + each.nbytes <= each.stride:
                found[-1] = PoolShare(begin, last.stride, last.nbytes + each.nbytes)
                order.setdefault(found[-1], order[last])
                continue
        found.append(each)
    return sorted(found, key=order.__getitem__)
