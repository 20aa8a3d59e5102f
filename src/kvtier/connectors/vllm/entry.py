"""Entry point that vLLM imports by name. It checks the contract first.

A vLLM that differs gets sentences that say where, instead of an error from deep inside; a process
that has kvtier installed and does not ask for it pays nothing.
"""

from __future__ import annotations

from importlib import import_module

from kvtier.connectors.vllm import contract


def __getattr__(name: str) -> object:
    """The class that vLLM's factory of specs was given by name.

    Raises ``ConfigError`` with all differences from the vLLM that kvtier knows.
    """
    if name != "KvtierSpec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    contract.VLLM.require()
    found: object = import_module("kvtier.connectors.vllm.offloading.spec").KvtierSpec
    return found
