"""Models that the engine can run: find, check, load, and describe their KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import kvtier
from kvtier.engine.checkpoint import read_config, read_eos_token_ids, read_weights
from kvtier.engine.model_names import BUILTIN, RandomName, find_model
from kvtier.engine.random_models import random_config, random_module
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ConfigError
from kvtier.identity import Basis, Identification, Identity, WeightsMemory
from kvtier.layout import DType, KVGroup, full_attention, latent_attention

# Servers have no terminal, and benchmarks have their own progress bar.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]

DEFAULT = "kvtier-tiny"

FULL = ("llama", "qwen2", "qwen3")
LATENT = ("deepseek_v3",)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

STEADY_ROTARY = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings whose frequencies do not depend on the length of the context."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its tokenizer.

    identity: of its weights, configuration and code.
    weights: determined the identity and can verify it; None for generated weights.
    made_by: everything else that determines the bits of KV.
    """

    name: str
    identity: Identity
    weights: Identification | None
    made_by: str
    module: PreTrainedModel
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_tokens: int


def load_model(name: str, device: torch.device, dtype_name: str) -> LoadedModel:
    """Load the model called ``name``: built-in, or a local directory in Hugging Face format."""
    directory = find_model(name)
    if isinstance(directory, RandomName):
        return _random_model(directory, device, dtype_name)
    config = read_config(directory)
    refuse_unsupported(config, name)
    eos_token_ids = read_eos_token_ids(directory, config)
    dtype = choose_dtype(dtype_name, device, config)
    tokenizer = Tokenizer(directory)  # before the weights: reading these takes minutes
    with _identified(directory) as weights:
        module = read_weights(directory, config, dtype)
        identity = weights.settle()
    return LoadedModel(
        name=directory.name,
        identity=identity,
        weights=weights,
        made_by=_made_by(device),
        module=_place(module, device),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        max_tokens=int(config.max_position_embeddings),
    )


def refuse_unsupported(config: PreTrainedConfig, name: str) -> None:
    """Raise ``ConfigError`` for attention whose prefixes this engine cannot restore."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - {"full_attention"})
    if odd:
        what = "sliding-window" if "sliding_attention" in odd else "recurrent or other"
        raise ConfigError(
            f"model: {name!r} has {what} layers ({', '.join(odd)}); the embedded engine serves "
            "full and latent (MLA) attention so far: choose a model of type "
            f"{', '.join((*FULL, *LATENT))}"
        )
    if config.model_type not in (*FULL, *LATENT):
        raise ConfigError(
            f"model: {name!r} is of type {config.model_type!r}; the embedded engine serves "
            f"{', '.join((*FULL, *LATENT))}"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotary not in STEADY_ROTARY:
        raise ConfigError(
            f"model: {name!r} has rotary embeddings of type {rotary!r}, whose frequencies may "
            "depend on the length of the context, so that a prefix has no KV of its own; the "
            f"embedded engine serves {', '.join(STEADY_ROTARY)}"
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        quantised = getattr(config, "compression_config", None)
    if quantised is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"model: {name!r} is quantised ({kind or 'by a method that it does not name'}); the "
            "embedded engine serves float32, bfloat16 and float16: choose the checkpoint that is "
            "not quantised, or serve this one with vLLM or SGLang"
        )


def choose_dtype(name: str, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype; auto is float32 on CPU, where bfloat16 is slow, else the model's own."""
    if name == "auto":
        own = getattr(config, "dtype", None)
        if device.type == "cpu" or not isinstance(own, torch.dtype):
            return torch.float32
        name = str(own).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is unknown; use auto, float32, bfloat16 or float16")
    assert isinstance(dtype, torch.dtype)
    return dtype


def kv_group(config: PreTrainedConfig, dtype: torch.dtype, block_size: int) -> KVGroup:
    """Return the layout of the model's KV per token, as transformers caches it."""
    kind = DType(str(dtype).removeprefix("torch."))
    layers = config.num_hidden_layers
    if config.model_type in LATENT:
        return latent_attention(
            layers, config.kv_lora_rank, config.qk_rope_head_dim, kind, block_size
        )
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return full_attention(layers, config.num_key_value_heads, head_dim, kind, block_size)


def _random_model(name: str, device: torch.device, dtype_name: str) -> LoadedModel:
    tokenizer = Tokenizer(BUILTIN / DEFAULT)
    config = random_config(name, read_config(BUILTIN / DEFAULT).vocab_size)
    dtype = choose_dtype(dtype_name, device, config)
    module = _place(random_module(name, config, device, dtype), device)
    limit = int(config.max_position_embeddings)
    identity = Identity(f"{name} seed-0", Basis.READ)
    return LoadedModel(name, identity, None, _made_by(device), module, tokenizer, (), limit)


def _place(module: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    torch.nn.Module.to(module, device)
    torch.nn.Module.eval(module)
    return module


@contextmanager
def _identified(directory: Path) -> Iterator[Identification]:
    """Yield the identification, which reads the files while they are loaded; stop it on failure."""
    weights = Identification([directory], WeightsMemory())
    weights.begin()
    try:
        yield weights
    except BaseException:
        weights.stop()
        raise


def _made_by(device: torch.device) -> str:
    """Return the versions and the kind of device, on which rounding may depend."""
    versions = f"transformers {transformers.__version__} torch {torch.__version__}"
    return f"kvtier {kvtier.__version__} {versions} {device.type}"
