"""SGLang's device pools as page addresses, for the linker's copies.

The buffers of plain pools are used directly. For all other pools, SGLang's
``resolve_hybrid_device_pool_group`` locates the buffers. Buffers that are addressed by the same
pages form one pool.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtier.connectors.common.paged_pool import PagedPool, PoolShare
from kvtier.connectors.common.recomputed import FLOATS, TokenPlaces
from kvtier.connectors.sglang.shared.ranks import KV, SWA
from kvtier.core.errors import ConfigError

LATENTS = ("MLATokenToKVPool", "NPUMLATokenToKVPool")
PLAIN = ("MHATokenToKVPool", "NPUMHATokenToKVPool", *LATENTS)
"""Classes that consist of buffers with one row per token, or per page."""
BESIDE = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer", "index_k_buffer")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor of a pool: rows [num_rows, ...] of one of the engine's layers.

    page_rows: rows per page.
    """

    layer: int
    rows: torch.Tensor
    page_rows: int

    @property
    def num_pages(self) -> int:
        return self.rows.shape[0] // self.page_rows

    @property
    def share(self) -> PoolShare:
        row_bytes = self.rows.element_size() * self.rows[0].numel()
        if not self.rows[0].is_contiguous():
            raise ConfigError(
                f"a device pool with rows of shape {tuple(self.rows.shape[1:])} and strides "
                f"{self.rows.stride()[1:]}: their bytes are not together; use another "
                "--attention-backend, or serve without the linker"
            )
        stride = self.rows.stride(0) * self.rows.element_size()
        if self.page_rows > 1 and stride != row_bytes:
            raise ConfigError(
                f"a device pool whose rows of {row_bytes} bytes are {stride} apart: a page is not "
                "in one piece; serve without the linker"
            )
        return PoolShare(self.rows.data_ptr(), stride * self.page_rows, row_bytes * self.page_rows)


@dataclass(frozen=True)
class DevicePool:
    """Buffers that are addressed by the same pages.

    Attributes:
        name: SGLang's name of the pool.
        page_size: SGLang's indices per page.
        num_layers: layers of the engine.
        buffers: in the order of layers.
        source: SGLang's pool.
    """

    name: str
    page_size: int
    num_layers: int
    buffers: Sequence[Buffer]
    source: Any

    @property
    def ends(self) -> list[int]:
        """Per layer, the number of buffers that belong to it or to earlier layers."""
        layers = [buffer.layer for buffer in self.buffers]
        return [sum(each <= layer for each in layers) for layer in range(self.num_layers)]

    @property
    def shapes(self) -> list[list[object]]:
        """Layer, dtype, row shape and rows per page of each buffer."""
        return [
            [buffer.layer, str(buffer.rows.dtype), list(buffer.rows.shape[1:]), buffer.page_rows]
            for buffer in self.buffers
        ]

    @property
    def has_latents(self) -> bool:
        """Whether it has MLA latents only, which are equal on all tensor-parallel ranks."""
        return type(self.source).__name__ in LATENTS

    @property
    def page_bytes(self) -> int:
        return sum(buffer.share.nbytes for buffer in self.buffers)

    def paged(self, slot_bytes: int) -> PagedPool:
        """Return its pages as blocks in slots of ``slot_bytes`` bytes."""
        first = self.buffers[0].rows
        return PagedPool(
            [[buffer.share for buffer in self.buffers]],
            min(buffer.num_pages for buffer in self.buffers),
            1,
            slot_bytes,
            first.device.type,
            [buffer.rows for buffer in self.buffers],
        )

    def tokens(self) -> list[list[TokenPlaces]] | None:
        """Return where the numbers of each token lie in a slot, by layer; None if not known."""
        layers: dict[int, list[TokenPlaces]] = {}
        before = 0
        for buffer in self.buffers:
            dtype = buffer.rows.dtype
            if dtype not in FLOATS or buffer.page_rows != self.page_size:
                return None
            num_bytes, size = buffer.share.nbytes, dtype.itemsize
            places = np.arange(num_bytes // size, dtype=np.int32).reshape(1, self.page_size, -1)
            tokens = TokenPlaces(dtype, before // size, places)
            layers.setdefault(buffer.layer, []).append(tokens)
            before += num_bytes
        return [*layers.values()]

    def pages(self, indices: torch.Tensor) -> list[int]:
        """Return the page numbers of SGLang's indices, which must be whole pages.

        Waits for the device if ``indices`` are in its memory.
        """
        firsts = indices.reshape(-1, self.page_size)[:, 0].cpu()
        if (firsts % self.page_size).any():
            raise ValueError(f"device indices begin pages of {self.page_size} at {firsts.tolist()}")
        found: list[int] = (firsts // self.page_size).tolist()
        return found


def find_pools(kvcache: Any, params: Any, components: Collection[Any]) -> list[DevicePool]:
    """Return all pools of a model, that of its KV first.

    Args:
        kvcache: SGLang's device pool.
        params: its ``CacheInitParams``.
        components: components of its tree.

    Raises:
        ConfigError: a pool can't be served.
    """
    page_size = params.page_size
    kind = type(kvcache).__name__
    drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    if kind in PLAIN and not drafts:
        layers = {layer: layer for layer in range(_num_layers(kvcache))}
        return [_plain(KV, kvcache, page_size, layers, len(layers))]
    if kind == "SWAKVPool" and not drafts and len(components) == 2:
        return _sliding(kvcache, page_size)
    return _resolved(kvcache, params, page_size, components)


def _num_layers(pool: Any) -> int:
    return len(pool.kv_buffer if _has(pool, "kv_buffer") else pool.k_buffer)


def _has(pool: Any, name: str) -> bool:
    return getattr(pool, name, None) is not None


def _plain(
    name: str, pool: Any, page_size: int, layers: Mapping[int, int], num_layers: int
) -> DevicePool:
    """Return a plain device pool; raise ``ConfigError`` for one that the linker cannot serve.

    layers: position in the pool of each of the engine's layers.
    """
    kind = type(pool).__name__
    if kind not in PLAIN:
        raise ConfigError(
            f"a device pool of {kind}: the linker serves {', '.join(PLAIN)} and what SGLang itself "
            "can resolve; serve without the linker"
        )
    if any(_has(pool, name) for name in BESIDE) or getattr(pool, "use_hnd", False):
        raise ConfigError(
            f"a device pool of {kind} with scales or an indexer beside it, or heads before tokens: "
            "the linker does not keep these; use another --kv-cache-dtype, unset "
            "SGLANG_USE_HND_KVCACHE, or serve without the linker"
        )
    parts = [pool.kv_buffer] if _has(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]
    buffers = [
        Buffer(layer, part[place], _page_rows(part[place], pool.size, page_size))
        for layer, place in layers.items()
        for part in parts
    ]
    return DevicePool(name, page_size, num_layers, buffers, pool)


def _page_rows(rows: torch.Tensor, num_tokens: int, page_size: int) -> int:
    """Return the rows per page of a buffer. A row is a token, or on some devices a page."""
    return page_size if rows.shape[0] >= num_tokens else 1


def _sliding(kvcache: Any, page_size: int) -> list[DevicePool]:
    """Return the pools of a sliding-window model: full attention, and the window."""
    first, num_layers = kvcache.start_layer, len(kvcache.layers_mapping)
    parts: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (place, is_window) in sorted(kvcache.layers_mapping.items()):
        parts[is_window][layer - first] = place
    return [
        _plain(KV, kvcache.full_kv_pool, page_size, parts[False], num_layers),
        _plain(SWA, kvcache.swa_kv_pool, page_size, parts[True], num_layers),
    ]


def _resolved(
    kvcache: Any, params: Any, page_size: int, components: Collection[Any]
) -> list[DevicePool]:
    """Return the pools whose buffers SGLang itself locates."""
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
        resolve_hybrid_device_pool_group,
    )

    try:
        group = resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=set(components)
        )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"a device pool of {type(kvcache).__name__}: SGLang does not say where its pages are "
            f"({error}); serve without the linker"
        ) from error
    by_source: dict[str, list[Any]] = {}
    for entry in group.entries:
        by_source.setdefault(str(entry.indices_from_pool.value), []).append(entry)
    return [
        DevicePool(
            name,
            entries[0].page_size,
            group.num_layers,
            sorted(
                (buffer for entry in entries for buffer in _buffers(entry)),
                key=lambda buffer: buffer.layer,
            ),
            entries[0].device_pool,
        )
        for name, entries in sorted(by_source.items(), key=lambda item: item[0] != KV)
    ]


def _buffers(entry: Any) -> list[Buffer]:
    """Return the buffers of one of SGLang's ``DevicePoolEntry``."""
    found = []
    for component, metas in zip(entry.components, entry.buffer_meta, strict=True):
        for layer, places in entry.layer_mapping.items():
            for place in [places] if isinstance(places, int) else places:
                rows, (_, _, num_bytes) = component[place], metas[place]
                page_rows = num_bytes * rows.shape[0] // rows.nbytes
                found.append(Buffer(layer, rows, page_rows))
    return found
