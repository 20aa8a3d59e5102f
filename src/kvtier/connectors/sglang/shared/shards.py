"""Shards of SGLang's pages by KV heads, for stores of engines of any tensor parallel size.

A page consists of parts in one piece each, [rows, heads, bytes] in memory, where a row is a token
of a layer in most layouts:

    layer_first         K or V of a layer       [tokens, heads, dim]
    page_first          K or V of all layers    [tokens * layers, heads, dim]
    page_first_direct   the same                [layers * tokens, heads, dim]
    page_head           the same                [1, heads, tokens * layers * dim]

A shard has its heads of all parts, in this order. Latents of MLA are a shard as they are. See
``kvtier.layout.division``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier.connectors.sglang.shared.device_pools import DevicePool
from kvtier.connectors.sglang.shared.pages import HostPool, Pages
from kvtier.connectors.sglang.shared.ranks import RankConfig
from kvtier.core.errors import ConfigError, LayoutError
from kvtier.layout import Division
from kvtier.tiers.wrappers import Shards

HEAD_AXES = {"layer_first": -2, "page_first": -2, "page_first_direct": -2, "page_head": -4}
"""Axis of heads in SGLang's host memory of K and V, by layout."""
TOKEN_FIRST = ("nhd", "paged_nhd")
"""SGLang's names of layouts of device memory whose rows are tokens, with heads one by one."""


class PagePart(NamedTuple):
    """Part of a page that lies in one piece: [num_rows, heads, bytes].

    Attributes:
        nbytes: bytes of the whole part.
        num_rows: the outermost axis.
        order: what else decides on the bytes of a shard, as JSON can hold it.
    """

    nbytes: int
    num_rows: int
    order: object


def num_kv_heads(options: object, has_latents: bool) -> int:
    """Return the KV heads of a layer, on all ranks together.

    Args:
        options: SGLang's ``ServerArgs``; None if unknown.
        has_latents: whether the model's KV are latents of MLA, which count as one.

    Raises:
        ConfigError: the options do not name the model, or SGLang adds heads.
    """
    if has_latents:
        return 1
    if not hasattr(options, "model_path"):
        raise ConfigError(
            "storage_shards: SGLang's options, which name the model, are not known here; leave it "
            "out"
        )
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils import is_cpu

    num_heads = int(ModelConfig.from_server_args(options).get_total_num_kv_heads())
    num_ranks = getattr(options, "tp_size", 1)
    device = getattr(options, "device", "") or ("cpu" if is_cpu() else "")
    if device == "cpu" and num_heads % num_ranks:
        raise ConfigError(
            f"storage_shards: on a CPU SGLang adds heads to {num_heads} KV heads for {num_ranks} "
            "ranks; leave it out"
        )
    return num_heads


def _divide(storage_shards: int, num_heads: int, config: RankConfig, own: int) -> Division:
    """Return the division of an engine. own: KV heads in this rank's pool."""
    if own != max(1, num_heads // config.tp_size):
        raise ConfigError(
            f"storage_shards: a pool of {own} KV heads on each of {config.tp_size} ranks can't be "
            f"told by heads, of which the model has {num_heads}; leave it out"
        )
    return Division.of(storage_shards, num_heads, config.tp_rank, config.tp_size)


def refuse_several(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if there are several pools: only KV is cut by heads."""
    if len(names) > 1:
        raise ConfigError(
            f"storage_shards: pages of {len(names)} pools ({', '.join(names)}) can't be cut by KV "
            "heads; leave it out"
        )


def host_shards(
    storage_shards: int, num_heads: int, config: RankConfig, pool: HostPool, pages: Pages
) -> Shards:
    """Return the shards that a rank has of the pages of one of SGLang's host pools.

    Args:
        storage_shards: the setting.
        num_heads: KV heads of a layer, on all ranks together; see ``num_kv_heads``.
        config: this rank.
        pool: SGLang's pool.
        pages: its pages.

    Raises:
        ConfigError: a rank would have a part of a shard, or other heads than the model.
        LayoutError: the axis of heads in the pool is not clear.
    """
    own = num_rows = 1
    if not config.is_mla_model:
        own, num_rows = _heads_of(pool), _rows_of(pool)
    division = _divide(storage_shards, num_heads, config, own)
    parts = [PagePart(size, num_rows, pool.layout) for size in pages.sizes.tolist()]
    seams = np.cumsum(pages.sizes) - pages.sizes
    return cut(parts, division, pages.num_bytes, seams.tolist())


def _rows_of(pool: Any) -> int:
    """Return the rows of a part of a page, by the pool's layout."""
    if pool.layout == "page_head":
        return 1
    return int(pool.page_size * (1 if pool.layout == "layer_first" else pool.layer_num))


def _heads_of(pool: Any) -> int:
    """Return the heads in a host pool of K and V."""
    given: Any = getattr(pool, "kv_buffer", ())
    buffers = list(given) if isinstance(given, (list, tuple)) else [given]
    device = {info.buffers.layout.value for info in getattr(pool, "_buffer_infos", ())}
    axis, own = HEAD_AXES.get(pool.layout, 0), getattr(pool, "head_num", 0)
    is_told = (
        type(pool).__name__ in ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
        and device
        and device <= {*TOKEN_FIRST}
        and axis
        and all(buffer.ndim >= -axis and buffer.shape[axis] == own for buffer in buffers)
    )
    if not is_told:
        raise LayoutError(
            f"storage_shards: KV heads can't be identified in pages of {type(pool).__name__} in "
            f"{pool.layout!r} from device memory in {', '.join(sorted(device)) or 'no known order'}"
            "; leave it out"
        )
    return int(own)


def device_shards(
    storage_shards: int, num_heads: int, config: RankConfig, pool: DevicePool, slot_bytes: int
) -> Shards:
    """Return the shards that a rank has of the pages of one of SGLang's device pools.

    Args:
        storage_shards, num_heads, config: see ``host_shards``.
        pool: SGLang's pool.
        slot_bytes: of a page in host memory.

    Raises:
        ConfigError: see ``host_shards``.
        LayoutError: the axis of heads in the pool is not clear.
    """
    own = num_rows = 1
    if not pool.has_latents:
        own, num_rows = _device_heads(pool), pool.page_size
    division = _divide(storage_shards, num_heads, config, own)
    parts = []
    for buffer in pool.buffers:
        order = [buffer.layer, str(buffer.rows.dtype), buffer.rows.shape[-1]]
        parts.append(PagePart(buffer.share.nbytes, num_rows, order))
    return cut(parts, division, slot_bytes)


def _device_heads(pool: DevicePool) -> int:
    """Return the heads in a device pool of K and V."""
    source = pool.source
    own = getattr(source, "head_num", 0)
    is_told = getattr(source, "kv_cache_layout", "") in TOKEN_FIRST and all(
        tuple(buffer.rows.shape[1:-1])
        == ((own,) if buffer.page_rows == pool.page_size else (pool.page_size, own))
        for buffer in pool.buffers
    )
    if not is_told:
        shapes = {str(tuple(buffer.rows.shape[1:])) for buffer in pool.buffers}
        raise LayoutError(
            f"storage_shards: KV heads can't be identified in a device pool of "
            f"{type(source).__name__} with rows of {', '.join(sorted(shapes))}; leave it out"
        )
    return int(own)


def cut(
    parts: Sequence[PagePart], division: Division, page_bytes: int, seams: Sequence[int] = ()
) -> Shards:
    """Return a rank's shards of a page.

    Args:
        parts: of the page, in its order.
        division: over ranks and shards.
        page_bytes: of a page in the memory that is read into and written from.
        seams: see ``Shards.joined``.

    Raises:
        LayoutError: a part does not consist of whole heads.
    """
    own, some = division.num_own, division.shard_heads
    names, offsets = [], []
    for part in parts:
        if part.nbytes % (part.num_rows * own):
            raise LayoutError(
                f"storage_shards: {own} KV heads can't be identified in {part.nbytes} bytes of a "
                "page; leave it out"
            )
    head_bytes = [part.nbytes // (part.num_rows * own) for part in parts]
    order = [
        [part.num_rows, size, part.order] for part, size in zip(parts, head_bytes, strict=True)
    ]
    nbytes = np.array([part.nbytes for part in parts], np.int64)
    begins = np.cumsum(nbytes) - nbytes
    for first in division.firsts:
        names.append(division.shard_name(first, order))
        offsets.append(
            np.concatenate(
                [
                    begin + size * (first + own * np.arange(part.num_rows))
                    for part, begin, size in zip(parts, begins, head_bytes, strict=True)
                ]
            )
        )
    sizes = np.repeat(np.array(head_bytes, np.int64) * some, [part.num_rows for part in parts])
    return Shards.joined(names, np.stack(offsets), sizes, page_bytes, division.is_writer, seams)
