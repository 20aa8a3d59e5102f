"""KV memory as data: the content of a block, and the addresses of its bytes."""

from __future__ import annotations

from kvtier.layout.division import Division
from kvtier.layout.group import (
    Attention,
    DType,
    KVGroup,
    Part,
    full_attention,
    latent_attention,
    opaque,
    recurrent_state,
    sliding_attention,
)
from kvtier.layout.layout import Axis, Layout, PartStrides, arrange
from kvtier.layout.named import ORDERS, named_layout
from kvtier.layout.repack import layer_view, part_view, repack
from kvtier.layout.spans import Fragments, SteppedFragments, fragments, spans, stepped_fragments

__all__ = [
    "ORDERS",
    "Attention",
    "Axis",
    "DType",
    "Division",
    "Fragments",
    "KVGroup",
    "Layout",
    "Part",
    "PartStrides",
    "SteppedFragments",
    "arrange",
    "fragments",
    "full_attention",
    "latent_attention",
    "layer_view",
    "named_layout",
    "opaque",
    "part_view",
    "recurrent_state",
    "repack",
    "sliding_attention",
    "spans",
    "stepped_fragments",
]
