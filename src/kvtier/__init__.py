"""kvtier: a hierarchical KV cache for LLM inference.

Start with ``kvtier.cache``: the façade reads top to bottom like the life of a request.
Importing this package imports nothing else: each public name brings its module when it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"

_MODULES = {
    "attach": "connectors.transformers",
    "open_cache": "shared_cache",
    "SharedCache": "shared_cache",
    "Prompt": "shared_cache",
    "Cache": "cache",
    "CacheConfig": "config",
    "Namespace": "keys",
    "token_labels": "keys",
    "Lease": "prompts.lease",
    "Hint": "hints",
    "Retain": "hints",
    "full_attention": "layout",
    "latent_attention": "layout",
    "opaque": "layout",
    "find_device": "devices",
    "DeviceTier": "tiers",
    "CacheError": "errors",
    "ConfigError": "errors",
    "UsageError": "errors",
    "LayoutError": "errors",
    "TierError": "errors",
    "DeviceError": "errors",
    "Closed": "errors",
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
