"""The embedded engine: transformers models over a paged, tiered KV cache.

Each name is imported on first use: settings can be checked before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.serve.engine.config import EngineConfig, EngineInfo
    from kvtier.serve.engine.engine import Engine
    from kvtier.serve.engine.grammar import Grammar, GrammarError, NoGrammarsError
    from kvtier.serve.engine.request import (
        Completion,
        EngineBusy,
        RequestError,
        RequestHandle,
        Token,
    )
    from kvtier.serve.engine.sampling import SamplingParams
    from kvtier.serve.engine.tokenizer import Detokenizer, Tokenizer
else:
    _MODULES = {
        "Completion": "request",
        "Detokenizer": "tokenizer",
        "Engine": "engine",
        "EngineBusy": "request",
        "EngineConfig": "config",
        "EngineInfo": "config",
        "Grammar": "grammar",
        "GrammarError": "grammar",
        "NoGrammarsError": "grammar",
        "RequestError": "request",
        "RequestHandle": "request",
        "SamplingParams": "sampling",
        "Token": "request",
        "Tokenizer": "tokenizer",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "Completion",
    "Detokenizer",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineInfo",
    "Grammar",
    "GrammarError",
    "NoGrammarsError",
    "RequestError",
    "RequestHandle",
    "SamplingParams",
    "Token",
    "Tokenizer",
]
