"""Entry point that SGLang imports by name. It checks the contract first.

An SGLang that differs gets sentences that say where, instead of an error from deep inside; a
process that has kvtier installed and does not ask for it pays nothing.
"""

from __future__ import annotations

from importlib import import_module

from kvtier.connectors.sglang.contract import LINKER, STORAGE

CLASSES = {
    "KvtierStorage": (STORAGE, "kvtier.connectors.sglang.storage"),
    "KvtierLinker": (LINKER, "kvtier.connectors.sglang.linker"),
}
"""By the name that SGLang's factories were given: what it relies on, and where it is."""


def __getattr__(name: str) -> object:
    """Raises ``ConfigError`` with all differences from the SGLang that kvtier knows."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    contract, module = CLASSES[name]
    contract.require()
    found: object = getattr(import_module(module), name)
    return found
