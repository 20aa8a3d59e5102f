"""The embedded engine: transformers models over a paged, tiered KV cache."""

from __future__ import annotations

from kvtier.engine.config import EngineConfig, EngineInfo
from kvtier.engine.engine import Engine
from kvtier.engine.request import Completion, EngineBusy, RequestError, RequestHandle, Token
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "Completion",
    "Detokenizer",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineInfo",
    "RequestError",
    "RequestHandle",
    "SamplingParams",
    "Token",
    "Tokenizer",
]
