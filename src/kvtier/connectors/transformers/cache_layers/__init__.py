"""transformers' own cache layers, stored as blocks and restored: for the engine and ``attach``."""

from __future__ import annotations

from kvtier.connectors.transformers.cache_layers.float32 import NoFloat32Error, in_float32
from kvtier.connectors.transformers.cache_layers.layers import (
    CACHE_FIELD,
    KNOWN_LAYERS,
    CacheLayers,
    UnsupportedModelError,
    cache_argument,
)

__all__ = [
    "CACHE_FIELD",
    "KNOWN_LAYERS",
    "CacheLayers",
    "NoFloat32Error",
    "UnsupportedModelError",
    "cache_argument",
    "in_float32",
]
