"""transformers' own cache layers, stored as blocks and restored: for the engine and ``attach``."""

from __future__ import annotations

from kvtier.cache_layers.layers import CacheLayers, UnsupportedModelError

__all__ = ["CacheLayers", "UnsupportedModelError"]
