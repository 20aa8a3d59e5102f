"""The device tier's memory as tensors: one flat pool, layer first, a view per layer and part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cache.audit import Distances, stacked, token_distances
from kvtier.core.types import Slot
from kvtier.devices import Memory
from kvtier.layout import KVGroup, named_layout
from kvtier.tiers import DeviceTier
from kvtier.tiers.memory import pages

PAGE_BYTES = 4096

Rows = slice | torch.Tensor
"""Rows of a view: a slice if contiguous, otherwise indices."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a layer's KV in a pool.

    layer: layer of the pool.
    bundle: of layers in a sequence's ring; None for the blocks that it has of all its tokens.
    """

    layer: int
    bundle: int | None = None


class KVPool:
    """``num_blocks`` blocks of KV on a torch device.

    Slot s holds tokens ``s * block_size .. (s + 1) * block_size`` of each view
    [num_blocks * block_size, num_heads, dim].

    places: of the model's layers; those of a model without windows by default.
    num_bundles: bundles of layers in a ring; 0 without windows.
    """

    def __init__(
        self,
        group: KVGroup,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        places: Sequence[Place] = (),
    ) -> None:
        self.group = group
        self.places = places or [Place(layer) for layer in range(group.num_layers)]
        self.num_bundles = 1 + max(
            -1 if place.bundle is None else place.bundle for place in self.places
        )
        self.dtype = dtype
        self.layout = named_layout("layer_first", group, num_blocks)
        self._device = device
        flat = zeros_from_a_page(self.layout.nbytes // dtype.itemsize, dtype, device)
        self.memory = Memory(flat.data_ptr(), self.layout.nbytes, device.type, flat)
        self._views: list[list[torch.Tensor]] = []
        self._gathered = [flat.new_empty(0) for _ in group.parts]
        for layer in range(group.num_layers):
            views = []
            for part, strides in zip(group.parts, self.layout.parts, strict=True):
                start = (strides.offset + layer * strides.layer) // dtype.itemsize
                start += int(flat.storage_offset())
                shape = (num_blocks * group.block_size, part.num_heads, part.dim)
                steps = (part.num_heads * part.dim, part.dim, 1)
                views.append(flat.as_strided(shape, steps, start))
            self._views.append(views)

    def tier(self) -> DeviceTier:
        """Return the pool as the cache's device tier."""
        return DeviceTier(self.memory, self.layout)

    @property
    def is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def tokens_in(self, num_bytes: int) -> int:
        """Return how many tokens' first part, in one layer, has this size; at least one."""
        part = self.group.parts[0]
        return max(1, num_bytes // (part.num_heads * part.dim * self.dtype.itemsize))

    def on_device(self, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
        """Return the values as a tensor on the pool's device."""
        return torch.from_numpy(values).to(self._device)

    def as_indices(self, rows: Rows) -> torch.Tensor:
        """Return one index for each row."""
        if isinstance(rows, slice):
            return torch.arange(rows.start, rows.stop, device=self._device)
        return rows

    def rows(self, slots: Sequence[Slot], start: int, end: int) -> Rows:
        """Return the rows of tokens ``start .. end`` of a sequence with these slots."""
        size = self.group.block_size
        first, last = start // size, (end - 1) // size
        if _are_neighbours(slots, first, last):
            base = (slots[first] - first) * size
            return slice(base + start, base + end)
        positions = torch.arange(start, end)
        table = torch.from_numpy(np.array(slots[: last + 1], np.int64))
        return (table[positions // size] * size + positions % size).to(self._device)

    def blocks(self, slots: Sequence[Slot], num_tokens: int) -> Rows:
        """Return the location of the first ``num_tokens`` tokens.

        Rows if contiguous, else block numbers.
        """
        last = (num_tokens - 1) // self.group.block_size
        if _are_neighbours(slots, 0, last):
            start = slots[0] * self.group.block_size
            return slice(start, start + num_tokens)
        return torch.from_numpy(np.array(slots[: last + 1], np.int64)).to(self._device)

    def write(self, layer: int, part: int, rows: Rows, values: torch.Tensor) -> None:
        """Store [num_tokens, num_heads, dim] in ``rows``."""
        view = self._views[layer][part]
        if isinstance(rows, slice):
            view[rows] = values
        else:
            view.index_copy_(0, rows, values)

    def read(self, layer: int, part: int, where: Rows, num_tokens: int) -> torch.Tensor:
        """Return the context at a result of ``blocks``: [num_tokens, num_heads, dim].

        It is a view of the pool if possible, else a copy that the next call for this part
        overwrites.
        """
        view = self._views[layer][part]
        if isinstance(where, slice):
            return view[where]
        blocks = view.view(-1, self.group.block_size, *view.shape[1:])
        return self._select(part, blocks, where).flatten(0, 1)[:num_tokens]

    def gather(self, layer: int, part: int, rows: Rows) -> torch.Tensor:
        """Return single rows: [num_rows, num_heads, dim]; a view or a copy, as ``read``."""
        view = self._views[layer][part]
        return view[rows] if isinstance(rows, slice) else self._select(part, view, rows)

    def copy_blocks(self, src: Sequence[Slot], dst: Sequence[Slot]) -> None:
        """Copy blocks within the pool. No slot of ``src`` is one of ``dst``."""
        at, to = (self.on_device(np.array(slots, np.int64)) for slots in (src, dst))
        for view in chain.from_iterable(self._views):
            blocks = view.view(-1, self.group.block_size, *view.shape[1:])
            blocks.index_copy_(0, to, blocks.index_select(0, at))

    def distances(self, found: Sequence[Slot], recomputed: Sequence[Slot]) -> Distances:
        """Return the distances of the KV in some blocks from that in others, layer by layer."""
        places = [self.on_device(np.array(slots, np.int64)) for slots in (found, recomputed)]

        def of_part(view: torch.Tensor) -> list[float]:
            blocks = view.view(-1, self.group.block_size, *view.shape[1:])
            return token_distances(*(blocks.index_select(0, at).flatten(0, 1) for at in places))

        return stacked(map(of_part, parts) for parts in self._views)

    def _select(self, part: int, view: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Copy rows into a reused buffer: allocating new memory would cost more than the copy."""
        shape = (len(where), *view.shape[1:])
        if self._gathered[part].numel() < prod(shape):
            self._gathered[part] = view.new_empty(prod(shape))
        gathered = self._gathered[part][: prod(shape)].view(shape)
        return torch.index_select(view, 0, where, out=gathered)


def zeros_from_a_page(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a page-aligned tensor [num] of zeros, so that a disk can be read directly into it.

    Zeroing makes all pages resident before the first request is timed. CPU memory uses huge pages
    if available, which makes copies, checksums and direct reads cheaper. It is excluded from core
    dumps.
    """
    whole = torch.empty(num + PAGE_BYTES // dtype.itemsize, dtype=dtype, device=device)
    first = -whole.data_ptr() % PAGE_BYTES // dtype.itemsize
    flat = whole[first : first + num]
    if device.type == "cpu":
        with suppress(OSError):
            whole_pages = flat.nbytes // PAGE_BYTES * PAGE_BYTES
            pages.advise(flat.data_ptr(), whole_pages, pages.MADV_HUGEPAGE)
        pages.leave_out_of_dumps(flat.data_ptr(), flat.nbytes)
    return flat.zero_()


def _are_neighbours(slots: Sequence[Slot], first: int, last: int) -> bool:
    run = slots[first : last + 1]
    return np.array_equal(run, np.arange(run[0], run[0] + len(run)))
