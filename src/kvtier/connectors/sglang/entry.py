"""Entry point that SGLang imports by name. It checks the contract first.

An unsupported SGLang gets a message that lists the differences, instead of an error from deep
inside. A process that has kvtier installed but does not use it imports nothing.
"""

from __future__ import annotations

from importlib import import_module

from kvtier.connectors.sglang.shared.contract import LINKER, STORAGE

CLASSES = {
    "KvtierStorage": (STORAGE, "kvtier.connectors.sglang.hicache.storage"),
    "KvtierLinker": (LINKER, "kvtier.connectors.sglang.linker.linker"),
}
"""By the class name given to SGLang's factories: the contract, and the module of the class."""


def __getattr__(name: str) -> object:
    """Import a class. Raise ``ConfigError`` with all differences if the contract is broken."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    contract, module = CLASSES[name]
    contract.require()
    found: object = getattr(import_module(module), name)
    return found
