"""KV bytes per token of a model, from its ``config.json``, without weights or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.core.errors import ConfigError, LayoutError
from kvtier.layout import DType, KVGroup, full_attention, latent_attention

AS_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that keep K and V per token."""


def kv_group(path: Path, dtype: str = "auto") -> KVGroup:
    """Return the layout of one token's KV, from the model's configuration.

    Layers with a window count as full attention, which gives an upper bound. Raises
    ``ConfigError``.

    path: ``config.json`` or its directory. dtype: data type of KV; "auto" for the model's.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model: {file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model: {file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {file} is no model's configuration")
    text = config.get("text_config")
    outer, config = config, text if isinstance(text, dict) else config
    odd = sorted(set(map(str, config.get("layer_types") or [])) - AS_ATTENTION)
    if odd:
        raise ConfigError(
            f"model: {file} has {', '.join(odd)} layers, whose states are not kept per token; give "
            "--bytes-per-token"
        )
    kind = _dtype(dtype, config, outer)

    def number(name: str) -> int:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"model: {file} has no {name}; give --bytes-per-token")
        return value

    layers = number("num_hidden_layers")
    try:
        if config.get("kv_lora_rank"):
            return latent_attention(
                layers, number("kv_lora_rank"), number("qk_rope_head_dim"), kind, 1
            )
        heads = number("num_attention_heads")
        num_kv_heads = number("num_key_value_heads") if "num_key_value_heads" in config else heads
        head_dim = number("head_dim") if config.get("head_dim") else number("hidden_size") // heads
        return full_attention(layers, num_kv_heads, head_dim, kind, 1)
    except LayoutError as error:
        raise ConfigError(f"model: {file}: {error}") from error


def _dtype(wanted: str, config: dict[str, Any], outer: dict[str, Any]) -> DType:
    if wanted == "auto":
        for each in (config, outer):
            for name in ("dtype", "torch_dtype"):
                if isinstance(each.get(name), str):
                    wanted = each[name]
        if wanted in ("auto", "float32"):
            wanted = "bfloat16"  # in which such models are served
    try:
        return DType(wanted)
    except ValueError as error:
        raise ConfigError(
            f"kv_dtype: {wanted!r} is unknown; use auto or one of {', '.join(DType)}"
        ) from error
