"""Lets SGLang compute MLA with plain torch, which it does by itself on accelerators only."""

from __future__ import annotations


def register() -> None:
    """SGLang calls it in each of its processes."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
