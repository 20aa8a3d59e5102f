"""kvtier: a hierarchical KV cache for LLM inference.

Start with ``kvtier.cache``: the façade reads top to bottom like the life of a request.
Importing this package needs numpy only; engines and devices are found when they are used.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
