"""Layouts in use, each as an order of axes. A new one is a new line, not a new branch."""

from __future__ import annotations

from kvtier.core.errors import LayoutError
from kvtier.layout.group import KVGroup
from kvtier.layout.layout import Axis, Layout, arrange

ORDERS: dict[str, tuple[Axis, ...]] = {
    # Device pools, which attention kernels read one layer at a time.
    "layer_first": (Axis.LAYER, Axis.PART, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    # K of all layers, then V of all layers: pools of two tensors.
    "part_first": (Axis.PART, Axis.LAYER, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    # Contiguous blocks: kvtier's host, disk and remote tiers.
    "block_first": (Axis.BLOCK, Axis.LAYER, Axis.PART, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    # SGLang's host pools, by SGLang's names.
    "page_first": (Axis.PART, Axis.BLOCK, Axis.TOKEN, Axis.LAYER, Axis.HEAD, Axis.DIM),
    "page_first_direct": (Axis.PART, Axis.BLOCK, Axis.LAYER, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    "page_first_kv_split": (Axis.PART, Axis.BLOCK, Axis.LAYER, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    "page_head": (Axis.PART, Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.LAYER, Axis.DIM),
}


def named_layout(name: str, group: KVGroup, num_blocks: int) -> Layout:
    """Return the layout called ``name`` (a key of ``ORDERS``) for blocks of ``group``."""
    if name not in ORDERS:
        raise LayoutError(f"no layout is called {name!r}; use one of {', '.join(sorted(ORDERS))}")
    return arrange(group, ORDERS[name], num_blocks)
