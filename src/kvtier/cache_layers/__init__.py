"""transformers' own cache layers, stored as blocks and restored: for the engine and ``attach``."""

from __future__ import annotations

from kvtier.cache_layers.layers import (
    CACHE_FIELD,
    KNOWN_LAYERS,
    CacheLayers,
    UnsupportedModelError,
    cache_argument,
)

__all__ = ["CACHE_FIELD", "KNOWN_LAYERS", "CacheLayers", "UnsupportedModelError", "cache_argument"]
