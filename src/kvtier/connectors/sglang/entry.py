"""What SGLang imports when kvtier is asked for by name."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    """The class that SGLang's factory of storage back ends was given by name."""
    if name != "KvtierStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = import_module("kvtier.connectors.sglang.storage").KvtierStorage
    return found
