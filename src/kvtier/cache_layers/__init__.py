"""transformers' own cache layers, stored as blocks and restored: for the engine and ``attach``."""

from __future__ import annotations

from kvtier.cache_layers.layers import KNOWN_LAYERS, CacheLayers, UnsupportedModelError

__all__ = ["KNOWN_LAYERS", "CacheLayers", "UnsupportedModelError"]
