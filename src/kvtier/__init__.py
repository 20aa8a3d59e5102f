"""kvtier: a hierarchical KV cache for LLM inference.

Start with ``kvtier.cache.tokens``: the façade reads top to bottom like the life of a request.
Importing this package imports nothing else: each public name brings its module when it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"

_MODULES = {
    "attach": "connectors.transformers",
    "open_cache": "cache.shared",
    "SharedCache": "cache.shared",
    "Prompt": "cache.shared",
    "Cache": "cache.tokens",
    "CacheConfig": "core.config",
    "Namespace": "core.keys",
    "token_labels": "core.keys",
    "Lease": "cache.lease",
    "Hint": "core.hints",
    "Retain": "core.hints",
    "full_attention": "layout",
    "latent_attention": "layout",
    "opaque": "layout",
    "find_device": "devices",
    "DeviceTier": "tiers",
    "CacheError": "core.errors",
    "ConfigError": "core.errors",
    "UsageError": "core.errors",
    "LayoutError": "core.errors",
    "TierError": "core.errors",
    "DeviceError": "core.errors",
    "Closed": "core.errors",
}
"""Public names, and the module of each. ``__init__.pyi`` tells type checkers the same."""

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - names of the table


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
