"""Models that the engine can run: find, check, load, and describe their KV."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import kvtier
from kvtier.connectors.transformers.cache_layers import KNOWN_LAYERS
from kvtier.core.errors import ConfigError
from kvtier.identity import Basis, Identification, Identity, WeightsMemory
from kvtier.serve.engine.checkpoint import (
    SamplingDefaults,
    read_config,
    read_eos_token_ids,
    read_sampling_defaults,
    read_weights,
)
from kvtier.serve.engine.layer_runner import LayerProfile
from kvtier.serve.engine.model_names import BUILTIN, DEFAULT, RandomName, find_local, find_model
from kvtier.serve.engine.profile import SERVED_LAYERS, MeasuredModel, measure, refuse_layers
from kvtier.serve.engine.random_models import random_config, random_module
from kvtier.serve.engine.tokenizer import Tokenizer

# Servers have no terminal, and benchmarks have their own progress bar.
disable_progress_bar()  # type: ignore[no-untyped-call]

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CONTEXT_FIELDS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_target_positions",
    "seq_length",
)
"""Fields of a configuration with the longest context; MPT, Whisper and BLOOM have the others."""

ASSUMED_CONTEXT = 2048
"""Tokens of a model whose configuration names none, as BLOOM was trained with."""

STEADY_ROTARY = ("default", "linear", "yarn", "llama3", "proportional")
"""Rotary embeddings whose frequencies do not depend on the length of the context."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its tokenizer.

    identity: of its weights, configuration and code.
    weights: determined the identity and can verify it; None for generated weights.
    made_by: everything else that determines the bits of KV.
    module: with the attention that its runner uses.
    """

    name: str
    identity: Identity
    weights: Identification | None
    made_by: str
    module: PreTrainedModel
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    max_tokens: int
    profile: MeasuredModel


def load_model(name: str, device: torch.device, dtype_name: str, revision: str = "") -> LoadedModel:
    """Load the model called ``name``, see ``find_model``."""
    is_of_hub = find_local(name, revision) is None
    directory = find_model(name, revision)
    if isinstance(directory, RandomName):
        return _random_model(directory, device, dtype_name)
    config = read_config(directory)
    refuse_unsupported(config, name)
    eos_token_ids = read_eos_token_ids(directory, config)
    sampling_defaults = read_sampling_defaults(directory)
    dtype = choose_dtype(dtype_name, device, config)
    tokenizer = Tokenizer(directory)  # before the weights: reading these takes minutes
    with _identified(directory) as weights:
        module = _place(read_weights(directory, config, dtype), device)
        profile = measure_model(module, name)
        identity = weights.settle()
    return LoadedModel(
        name=name if is_of_hub else directory.name,
        identity=identity,
        weights=weights,
        made_by=_made_by(device),
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        sampling_defaults=sampling_defaults,
        max_tokens=_max_tokens(config, name),
        profile=profile,
    )


def refuse_unsupported(config: PreTrainedConfig, name: str) -> None:
    """Raise ``ConfigError`` for what a configuration says, before weights are read."""
    known = [layer.__name__ for layer in KNOWN_LAYERS]
    refuse_layers(config, name, known, by="the embedded engine")
    for rotary in rotary_types(config):
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


def measure_model(module: PreTrainedModel, name: str, slow_because: str = "") -> MeasuredModel:
    """Return what a loaded model keeps, for the paged runner if that can serve it.

    slow_because: why the paged runner is not to serve it.

    Raises ``ConfigError`` if no runner can.
    """
    try:
        if slow_because:
            raise ConfigError(slow_because)
        refuse_layers(module.config, name, SERVED_LAYERS, by="paged attention")
        return measure(module, name)
    except ConfigError as error:
        try:
            return LayerProfile(module, name, str(error).removeprefix("model: "))
        except ConfigError as another:
            raise another from error


def rotary_types(config: PreTrainedConfig) -> list[object]:
    """Return the types of rotary embeddings, one for each type of layer; none without."""
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    each = [found] if "rope_type" in found else list(found.values())
    return [one.get("rope_type") if isinstance(one, dict) else None for one in each if one]


def _max_tokens(config: PreTrainedConfig, name: str) -> int:
    """Return the longest context that the configuration allows."""
    text = config.get_text_config(decoder=True)
    for field in CONTEXT_FIELDS:
        limit = getattr(text, field, None)
        if limit is None:
            continue
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError(
                f"model: {name!r} has the {field} {limit!r}, so that its longest context is "
                "unknown; give a positive number in its config.json"
            )
        return limit
    logger.warning(
        "model: %r names no longest context, and %d tokens are assumed; if it takes more, give "
        "max_position_embeddings in its config.json",
        name,
        ASSUMED_CONTEXT,
    )
    return ASSUMED_CONTEXT


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


def _random_model(name: str, device: torch.device, dtype_name: str) -> LoadedModel:
    tokenizer = Tokenizer(BUILTIN / DEFAULT)
    config = random_config(name, read_config(BUILTIN / DEFAULT).vocab_size)
    dtype = choose_dtype(dtype_name, device, config)
    module = _place(random_module(name, config, device, dtype), device)
    return LoadedModel(
        name=name,
        identity=Identity(f"{name} seed-0", Basis.READ),
        weights=None,
        made_by=_made_by(device),
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=(),
        sampling_defaults=SamplingDefaults(),
        max_tokens=_max_tokens(config, name),
        profile=measure_model(module, name),
    )


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
