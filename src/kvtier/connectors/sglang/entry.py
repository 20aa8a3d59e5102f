"""What SGLang imports when kvtier is asked for by name: the contract is compared first.

An SGLang that differs gets sentences that say where, instead of an error from deep inside; a
process that has kvtier installed and does not ask for it pays nothing.
"""

from __future__ import annotations

from importlib import import_module

from kvtier.connectors.sglang.contract import STORAGE


def __getattr__(name: str) -> object:
    """The class that SGLang's factory of storage back ends was given by name. Raises
    ``ConfigError`` with all differences from the SGLang that kvtier knows."""
    if name != "KvtierStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    STORAGE.require()
    found: object = import_module("kvtier.connectors.sglang.storage").KvtierStorage
    return found
