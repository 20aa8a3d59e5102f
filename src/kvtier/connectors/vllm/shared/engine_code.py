"""Code from outside vLLM that decides on the bytes of its KV.

vLLM's own code is known by its version. That of plug-ins, of models and attention back ends that
are registered from elsewhere, and of another platform is known by its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvtier.connectors.common.plugins import plugin_modules
from kvtier.identity import code_digest, process_start_ns

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

KNOWN = ("kvtier", "torch", "transformers", "vllm")
"""Packages that vLLM's version, kvtier's formats or a version of their own identify."""
ENUMS = ("AttentionBackendEnum", "MambaAttentionBackendEnum")
OVERRIDES = ("_ATTN_OVERRIDES", "_MAMBA_ATTN_OVERRIDES")
TRANSFORMERS = "vllm.model_executor.models.transformers"
"""Package of the models that vLLM runs by the code of Transformers."""


def engine_code(config: VllmConfig, models: Iterable[ModelConfig]) -> list[str]:
    """Return texts that identify the code from outside vLLM; [] if there is none.

    Raises:
        UnknownCodeError: some of it can't be identified.
    """
    classes = [name for model in models for name in _classes(model)]
    import transformers
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    modules = [
        *plugin_modules("vllm.general_plugins", _allowed()),
        type(current_platform).__module__,
        *_attention(),
        *classes,
        *(each for each in (parallel.worker_cls, parallel.worker_extension_cls) if each != "auto"),
    ]
    digest = code_digest(filter(None, modules), KNOWN, process_start_ns())
    told = [f"transformers {transformers.__version__}"] if _uses_transformers(classes) else []
    return [*told, digest] if digest else told


def _allowed() -> list[str] | None:
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else names.split(",")


def _classes(model: ModelConfig) -> Iterator[str]:
    """Yield the modules of a model's classes, as they are registered now."""
    from vllm.model_executor.models import ModelRegistry

    names = {*model.architectures, getattr(model, "architecture", None)}
    for name in names & ModelRegistry.models.keys():
        found = ModelRegistry.models[name]
        loaded = getattr(found, "model_cls", None)
        if loaded is None:
            yield found.module_name
        else:
            yield from (each.__module__ for each in loaded.__mro__)


def _attention() -> Iterator[str]:
    """Yield the full names of attention back ends."""
    import vllm.v1.attention.backends.registry as attention

    for name in ENUMS:
        yield from (each.value for each in getattr(attention, name, ()) if each.value)
    for name in OVERRIDES:
        yield from getattr(attention, name, {}).values()


def _uses_transformers(classes: Iterable[str]) -> bool:
    return any(class_.startswith(TRANSFORMERS) for class_ in classes)
