"""Locations of a page in SGLang's pools on Ascend, on the device and in host memory.

Device pools are layer-first, host pools page-first. A page of one layer is contiguous in both:

    device [layer, page, token, ...]        host [page, layer, token, ...]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cache.transfer.staging import coalesce, layers_per_step
from kvtier.core.errors import LayoutError
from kvtier.devices import CopyBatch, Direction, Memory

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """Pieces of equal size: piece (row r, page p) is at ``address + r * row + p * page``."""

    address: int
    row: int
    page: int
    num_pages: int

    def at(self, rows: Int64s, pages: Int64s) -> Int64s:
        """Return the pieces' addresses: int64 [num_rows * num_pages], row after row."""
        return np.asarray(self.address + np.add.outer(rows * self.row, pages * self.page)).ravel()


@dataclass(frozen=True, slots=True, eq=False)
class AscendPart:
    """The bytes that one tensor of a pool keeps of every page.

    Attributes:
        device: pieces on the device.
        host: pieces in host memory.
        nbytes: bytes per piece.
        layers: per row, the layer of the pool with which it is copied: int64 [num_rows].
    """

    device: Grid
    host: Grid
    nbytes: int
    layers: Int64s


class PageMove:
    """Copy of some pages between a pool's device and host memory, layer by layer.

    Args:
        parts: parts of the pool.
        host_tokens: SGLang's token indices in host memory, int64; a page is known by its first.
        device_tokens: the same on the device; the tensor itself is in host memory.
        page_size: tokens per page.
        num_layers: layers that are loaded one by one.

    Raises:
        LayoutError: the tokens are not whole pages of the pool.
    """

    def __init__(
        self,
        parts: Sequence[AscendPart],
        host_tokens: torch.Tensor,
        device_tokens: torch.Tensor,
        page_size: int,
        num_layers: int,
    ) -> None:
        if len(host_tokens) != len(device_tokens) or len(host_tokens) % page_size:
            raise LayoutError(
                f"{len(host_tokens)} tokens in host memory and {len(device_tokens)} on the device "
                f"are not the same pages of {page_size} tokens"
            )
        self.host_tokens, self.device_tokens = host_tokens, device_tokens
        self._parts = parts
        self._host = _pages(host_tokens, page_size, [part.host for part in parts])
        self._device = _pages(device_tokens, page_size, [part.device for part in parts])
        self.num_layers = num_layers
        num_bytes = len(self._host) * sum(part.nbytes * len(part.layers) for part in parts)
        self.layers_per_step = layers_per_step(num_layers, num_bytes) if num_layers else 1
        self.num_done = 0
        """Layers submitted to the device so far."""

    def batch(self, direction: Direction, layers: range) -> CopyBatch:
        """Return the copies of some layers as one batch."""
        at_device, at_host, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [0]
        counts = [0]
        for part in self._parts:
            rows = np.flatnonzero((part.layers >= layers.start) & (part.layers < layers.stop))
            at_device.append(part.device.at(rows, self._device))
            at_host.append(part.host.at(rows, self._host))
            sizes.append(part.nbytes)
            counts.append(len(rows) * len(self._host))
        size = np.repeat(np.array(sizes, np.int64), counts)
        device, on_device = _memory("device", np.concatenate(at_device), size)
        host, in_host = _memory("host", np.concatenate(at_host), size)
        if direction is Direction.LOAD:
            return coalesce(CopyBatch(host, device, in_host, on_device, size))
        return coalesce(CopyBatch(device, host, on_device, in_host, size))


def mha_parts(pool: Any) -> list[AscendPart]:
    """Return the parts of a pool with separate K and V, layout ``page_first_direct``."""
    found: list[AscendPart] = []
    for number, (device_k, device_v, host_k, host_v) in enumerate(pool._npu_transfer_buffers()):
        layers = _layers(pool, number, len(device_k))
        found += _parts((device_k, host_k, layers), (device_v, host_v, layers))
    return found


def mla_parts(pool: Any) -> list[AscendPart]:
    """Return the parts of an MLA pool, layout ``page_first_kv_split``.

    An indexer has rows for some layers only.
    """
    found: list[AscendPart] = []
    for number, slices in enumerate(pool._npu_transfer_pool_slices()):
        native, host_k, host_v, host_index, host_scales = slices
        layers = _layers(pool, number, len(native.k))
        indexed = native.index_layer_indices
        found += _parts(
            (native.k, host_k, layers),
            (native.v, host_v, layers),
            (native.index_k, host_index, indexed),
            (native.index_scales, host_scales, indexed),
        )
    return found


def _layers(pool: Any, number: int, num_rows: int) -> Sequence[int]:
    """Return the layer of each row.

    The model's own layers are copied one by one. Layers of a draft model are copied with the last
    one, since they are needed only after the whole model.
    """
    return range(num_rows) if number == 0 else [pool.target_layer_num - 1] * num_rows


def _parts(*tensors: tuple[Any, Any, Sequence[int]]) -> Iterator[AscendPart]:
    for device, host, layers in tensors:
        if device is None or host is None or not device.numel() or not host.numel():
            continue
        pieces = (device[0, 0], host[0, 0])
        if (
            pieces[0].shape != pieces[1].shape
            or device.dtype != host.dtype
            or not len(device) == host.shape[1] == len(layers)
            or not all(piece.is_contiguous() for piece in pieces)
        ):
            raise LayoutError(
                f"a tensor {tuple(device.shape)} of {device.dtype} on the device is not mirrored by"
                f" {tuple(host.shape)} of {host.dtype} in host memory, page by page"
            )
        nbytes = pieces[0].numel() * device.element_size()
        yield AscendPart(
            _grid(device, rows=0, pages=1), _grid(host, rows=1, pages=0), nbytes, np.array(layers)
        )


def _grid(tensor: torch.Tensor, rows: int, pages: int) -> Grid:
    """Return the address grid of a tensor. rows, pages: its dimensions of rows and pages."""
    size = tensor.element_size()
    row, page = tensor.stride(rows) * size, tensor.stride(pages) * size
    return Grid(tensor.data_ptr(), row, page, tensor.shape[pages])


def _pages(tokens: torch.Tensor, page_size: int, grids: Sequence[Grid]) -> Int64s:
    found: Int64s = tokens[::page_size].numpy().astype(np.int64) // page_size
    num_pages = min((grid.num_pages for grid in grids), default=0)
    if len(found) and not 0 <= found.min() <= found.max() < num_pages:
        raise LayoutError(f"page {found.min()} or {found.max()} is none of {num_pages}")
    return found


def _memory(kind: str, addresses: Int64s, size: Int64s) -> tuple[Memory, Int64s]:
    """Return one memory around all pieces, and the pieces' offsets in it.

    The caller keeps the tensors alive.
    """
    begin = int(addresses.min(initial=np.iinfo(np.int64).max)) if len(addresses) else 0
    end = int((addresses + size).max(initial=begin))
    return Memory(begin, end - begin, kind, None), addresses - begin
