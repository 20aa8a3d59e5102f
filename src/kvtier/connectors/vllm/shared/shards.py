"""Shards of vLLM's blocks by KV heads and layers, for stores of engines of any parallel size.

The bytes of a shard are those of its heads, layer after layer, in the order of a layer's axes in
memory. Its name contains all facts that decide on that order, so ranks that differ in one of them
find none of each other's shards. See ``kvtier.layout.division``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from kvtier.connectors.common.paged_pool import PoolShare
from kvtier.connectors.vllm.shared.pages import (
    Cache,
    EnginePages,
    LayerSize,
    page_rows,
    row_runs,
    tensors_of,
)
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.errors import ConfigError, LayoutError
from kvtier.layout import Division
from kvtier.tiers.wrappers import Shards

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Int64s = npt.NDArray[np.int64]


def division_of(config: VllmConfig, settings: VllmSettings) -> Division:
    """Return the division of an engine.

    Raises ``ConfigError`` if a rank would have a part of a shard.
    """
    parallel, model = config.parallel_config, config.model_config
    context_parallel = parallel.decode_context_parallel_size * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    if context_parallel > 1:
        raise settings.wrong(
            "storage_shards: under context parallelism a rank has tokens of a block, not heads; "
            "leave it out"
        )
    stage_layers = 0
    if settings.storage_stages:
        num_layers = int(model.get_total_num_hidden_layers())
        stage_layers, rest = divmod(num_layers, settings.storage_stages)
        if rest or not stage_layers:
            raise settings.wrong(
                f"storage_stages: {num_layers} layers can't be cut into "
                f"{settings.storage_stages} equal stages"
            )
    num_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    size = parallel.tensor_parallel_size
    shards = settings.storage_shards
    return Division.of(shards, num_heads, parallel.rank % size, size, stage_layers)


def _stages(division: Division, layers: Sequence[LayerSize]) -> list[list[LayerSize]]:
    """Return the layers of a rank, by stage."""
    if not division.stage_layers:
        return [list(layers)]
    stages: dict[int, list[LayerSize]] = {}
    for layer in layers:
        stages.setdefault(_index_of(layer.name) // division.stage_layers, []).append(layer)
    return [*stages.values()]


def _index_of(layer: str) -> int:
    """Return the number of a layer in its model, the first one in its name."""
    found = next((each for each in layer.split(".") if each.isdecimal()), None)
    if found is None:
        raise ConfigError(f"storage_stages: {layer} has no number; leave it out")
    return int(found)


@dataclass(frozen=True, slots=True)
class _LayerKV:
    """KV of one layer in memory.

    page_axis: of all its tensors. num_rows: entries along this axis that make a page. head_axes: of
    each tensor; None for one without heads.
    """

    name: str
    parts: Sequence[torch.Tensor]
    page_axis: int
    num_rows: int
    head_axes: Sequence[int | None]

    def heads(self, first: int, num: int) -> list[torch.Tensor]:
        """Return views of some heads of the rank's."""
        return [
            part if axis is None else part.narrow(axis, first, num)
            for part, axis in zip(self.parts, self.head_axes, strict=True)
        ]

    def describe(self, num_heads: int) -> object:
        """Return what decides on the order of the bytes of so many heads."""
        views = self.heads(0, num_heads)
        return [self.num_rows, *(_order(view, self.page_axis) for view in views)]


def _own_kv(
    layers: Sequence[LayerSize],
    kv_caches: Mapping[str, Cache],
    num_pages: int,
    division: Division,
) -> list[_LayerKV]:
    found = []
    for layer in layers:
        if layer.is_state:
            raise LayoutError(
                f"storage_shards: {layer.name} keeps a recurrent state, which has no KV heads to "
                "cut it by; leave it out"
            )
        parts = tensors_of(kv_caches[layer.name])
        axis, num_rows = page_rows(layer, parts, num_pages)
        axes = [_head_axis(layer.name, part, axis, division.num_own) for part in parts]
        found.append(_LayerKV(layer.name, parts, axis, num_rows, axes))
    return found


def _head_axis(layer: str, part: torch.Tensor, page_axis: int, num_heads: int) -> int | None:
    """Return the axis of heads; None for latents, which have none.

    Beside pages and heads a tensor has an axis of tokens, one of a head's content, the last one,
    and with a fifth one K and V, which is next to that of pages.
    """
    inner = [at for at in range(part.ndim) if at != page_axis]
    if part.ndim == 5:
        inner.remove(1 - page_axis)
    if len(inner) == 2 and num_heads == 1:
        return None
    found = [at for at in inner[:-1] if part.size(at) == num_heads]
    if len(inner) != 3 or len(found) != 1:
        raise LayoutError(
            f"storage_shards: {layer}: the axis of {num_heads} KV heads can't be identified in "
            f"{tuple(part.shape)}; leave it out"
        )
    return found[0]


def _order(view: torch.Tensor, page_axis: int) -> object:
    """Return the type, and each axis with its size, the outermost first; that of pages has 0."""
    axes = [at for at in range(view.ndim) if view.size(at) > 1 or at == page_axis]
    axes.sort(key=view.stride, reverse=True)
    return str(view.dtype), [(at, 0 if at == page_axis else view.size(at)) for at in axes]


def layout_of(
    layers: Sequence[LayerSize],
    kv_caches: Mapping[str, Cache],
    num_pages: int,
    division: Division,
) -> str:
    """Return a digest of the order of bytes of all layers, whatever the number of ranks."""
    own = _own_kv(layers, kv_caches, num_pages, division)
    told = {json.dumps(each.describe(division.shard_heads)) for each in own}
    return blake3(json.dumps(sorted(told)).encode()).hexdigest()


def shards_of(
    pages: EnginePages,
    groups: Sequence[Sequence[LayerSize]],
    kv_caches: Mapping[str, Cache],
    division: Division,
    pages_per_block: int,
    slot_bytes: int,
) -> Shards:
    """Return the shards that a rank has of its blocks.

    Blocks of all KV groups are cut alike: where a group has fewer layers, the rest of a shard is
    unused.

    groups: the layers of each KV group.

    Raises ``LayoutError`` if the axis of heads is not clear, or the shards have unequal sizes.
    """
    cuts = [
        _cut(_Slots.of(shares, pages_per_block), layers, kv_caches, division, pages.num_pages)
        for shares, layers in zip(pages.groups, groups, strict=True)
    ]
    if any(len(cut) != len(cuts[0]) for cut in cuts):
        raise LayoutError("storage_stages: a KV group has no layers in some stage; leave it out")
    names, offsets, sizes = [], [], []
    for number, of_groups in enumerate(zip(*cuts, strict=True)):
        first = division.firsts[number % len(division.firsts)]
        layers = [part.layers for part in of_groups]
        names.append(division.shard_name(first, layers if len(layers) > 1 else layers[0]))
        largest = max(of_groups, key=lambda part: len(part.sizes))
        if not all(part.is_within(largest) for part in of_groups):
            raise LayoutError(
                "storage_shards: layers of the KV groups differ in the heads or the size of their "
                "pages; leave it out"
            )
        offsets.append(largest.offsets)
        sizes.append(largest.sizes)
    if any(not np.array_equal(size, sizes[0]) for size in sizes):
        totals = ", ".join(str(int(size.sum())) for size in sizes)
        raise LayoutError(
            f"storage_shards: a rank's shards have unequal sizes ({totals} bytes); use another "
            "number of storage_stages"
        )
    return Shards.joined(names, np.stack(offsets), sizes[0], slot_bytes, division.is_writer)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a group's blocks that is one shard.

    layers: what decides on the order of its bytes. offsets, sizes: int64 [num_pieces], of its
    pieces in a block's slot.
    """

    layers: Sequence[object]
    offsets: Int64s
    sizes: Int64s

    def is_within(self, other: _Part) -> bool:
        """Whether its pieces are the first ones of another group's part."""
        num = len(self.sizes)
        return np.array_equal(self.offsets, other.offsets[:num]) and np.array_equal(
            self.sizes, other.sizes[:num]
        )


def _cut(
    slots: _Slots,
    layers: Sequence[LayerSize],
    kv_caches: Mapping[str, Cache],
    division: Division,
    num_pages: int,
) -> list[_Part]:
    """Return the parts of a group's blocks, stage by stage."""
    parts: list[_Part] = []
    for stage in _stages(division, layers):
        own = _own_kv(stage, kv_caches, num_pages, division)
        # Layers that share their KV have it once, under the name of the last one.
        own = [*{each.parts[0].data_ptr(): each for each in own}.values()]
        described = [[each.name, each.describe(division.shard_heads)] for each in own]
        parts += [
            _Part(described, *slots.pieces(own, first, division.shard_heads))
            for first in division.firsts
        ]
    return parts


@dataclass(frozen=True, slots=True)
class _Slots:
    """Positions of pages' bytes in a block's slot. int64 [num_shares], by address of page 0."""

    address: Int64s
    nbytes: Int64s
    before: Int64s
    pages_per_block: int

    @classmethod
    def of(cls, group: Sequence[PoolShare], pages_per_block: int) -> _Slots:
        nbytes = np.array([share.nbytes for share in group], np.int64)
        address = np.array([share.address for share in group], np.int64)
        order = np.argsort(address)
        before = np.cumsum(nbytes) - nbytes
        return cls(address[order], nbytes[order], before[order], pages_per_block)

    def pieces(self, layers: Sequence[_LayerKV], first: int, num: int) -> tuple[Int64s, Int64s]:
        """Return offsets and sizes of the pieces of some heads of a block, in a shard's order."""
        offsets, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for layer in layers:
            for view in layer.heads(first, num):
                runs = row_runs(view, layer.page_axis, layer.num_rows)
                address = np.array([run.address for run in runs], np.int64)
                stride = np.array([run.stride for run in runs], np.int64)
                nbytes = np.array([run.nbytes for run in runs], np.int64)
                page = np.arange(self.pages_per_block)
                # As neighbours in the pool, for the order of axes to be that of addresses.
                place = (address[:, None] + np.outer(stride, page)).ravel()
                share = np.searchsorted(self.address, address, "right") - 1
                within = address - self.address[share]
                is_inside = (within >= 0) & (within + nbytes <= self.nbytes[share])
                assert is_inside.all(), f"{layer.name}: bytes that belong to no page"
                base = self.before[share] * self.pages_per_block + within
                at = (base[:, None] + np.outer(self.nbytes[share], page)).ravel()
                order = np.argsort(place, kind="stable")
                offsets.append(at[order])
                sizes.append(np.repeat(nbytes, len(page))[order])
        return np.concatenate(offsets), np.concatenate(sizes)
