"""Weights of a vLLM engine, and the options that decide on the bytes of its KV."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvtier.connectors.common.plugins import plugin_modules
from kvtier.connectors.common.weights import MODEL_FILES, Source
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.identity import UnknownCodeError, code_digest, process_start_ns

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FROM_FILES = MODEL_FILES | {"hf"}
"""Load formats of vLLM's that read the model's own files, and nothing else."""
MODEL_TRAITS = (
    "disable_sliding_window", "dtype", "mm_processor_kwargs", "model_class_overrides", "model_impl",
    "quantization", "quantization_config", "revision",
)  # fmt: skip
CACHE_TRAITS = (
    "cache_dtype", "calculate_kv_scales", "kv_cache_dtype_skip_layers", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
)  # fmt: skip
ADAPTER_TRAITS = (
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_tower_connector_lora",
    "lora_dtype", "target_modules",
)  # fmt: skip
"""vLLM options that change the bytes of KV and are neither in the model's files nor in
``EngineFacts``. An option that a version lacks has one value for all who run that version."""

KNOWN = ("kvtier", "torch", "transformers", "vllm")
"""Packages that vLLM's version, kvtier's formats or a version of their own identify."""
ENUMS = ("AttentionBackendEnum", "MambaAttentionBackendEnum")
OVERRIDES = ("_ATTN_OVERRIDES", "_MAMBA_ATTN_OVERRIDES")
TRANSFORMERS = "vllm.model_executor.models.transformers"
"""Package of the models that vLLM runs by the code of Transformers."""


def _models(config: VllmConfig) -> list[ModelConfig]:
    """The model, and the one that drafts for it: its KV is kept, too."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    models = [config.model_config]
    return models if draft is None or draft is models[0] else [*models, draft]


def settle(names: VllmNames, config: VllmConfig) -> None:
    """Identify the weights that KV is computed with, and derive the names of blocks from them."""
    if getattr(config.cache_config, "calculate_kv_scales", False):  # up to 0.29
        names.disown("its scales are computed from the first prompt (calculate_kv_scales)")
        return
    try:
        code = engine_code(config, _models(config))
    except UnknownCodeError as error:
        names.disown(str(error))
    else:
        names.settle(sources(config), traits(config, code))


def sources(config: VllmConfig) -> list[Source]:
    """Return the sources of all weights that KV is computed with."""
    load = config.load_config
    found = [
        vllm_source(
            # Of a model in an object store, ``model`` is a local folder without the weights.
            getattr(model, "model_weights", "") or model.model,
            getattr(model.hf_config, "_commit_hash", None) or model.revision or "",
            load.download_dir or "",
            str(load.load_format),
        )
        for model in _models(config)
    ]
    return [*found, *(source for model in _models(config) for source in _code_elsewhere(model))]


def vllm_source(
    model: str, revision: str = "", download_dir: str = "", load_format: str = "auto"
) -> Source:
    """Return the source from which vLLM loads a model."""
    return Source(
        model,
        revision,
        download_dir,
        load_format,
        is_in_files=load_format in FROM_FILES,
        has_other_hub=os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"),
    )


def _code_elsewhere(model: ModelConfig) -> list[Source]:
    """Return the repositories, other than a model's own, that its code is loaded from."""
    if not model.trust_remote_code:
        return []
    named = getattr(model.hf_config, "auto_map", None) or {}
    repositories = {str(each).partition("--")[0] for each in named.values() if "--" in str(each)}
    return [
        vllm_source(repository, model.code_revision or "") for repository in sorted(repositories)
    ]


def traits(config: VllmConfig, code: Sequence[str] = ()) -> str:
    """Return the facts that decide on the bytes of KV beside weights and layout, as JSON.

    code: identifies the code from outside vLLM.
    """
    cache, load = config.cache_config, config.load_config
    found = {
        "models": [_model_traits(model) for model in _models(config)],
        "cache": {name: getattr(cache, name, None) for name in CACHE_TRAITS},
        "loader": [str(load.load_format), load.model_loader_extra_config],
        "draft": getattr(config.speculative_config, "method", None),
    }
    if code:  # else names stay what they were before it counted
        found["code"] = list(code)
    return json.dumps(found, sort_keys=True, default=str)


def adapter_traits(config: VllmConfig) -> str:
    """Return the options that decide on what an adapter does to KV."""
    return json.dumps(
        {name: getattr(config.lora_config, name, None) for name in ADAPTER_TRAITS}, default=str
    )


def _model_traits(model: ModelConfig) -> dict[str, object]:
    files = model.hf_config.to_dict()
    files.pop("_name_or_path", None)  # a model that was moved is the same model
    own = {name: getattr(model, name, None) for name in MODEL_TRAITS}
    # One rotary embedding is scaled by how long prompts may be, and not by how long they are.
    length = model.max_model_len if "longrope" in json.dumps(files, default=str) else None
    return {**own, "config": files, "length": length}


def engine_code(config: VllmConfig, models: Iterable[ModelConfig]) -> list[str]:
    """Return texts that identify the code from outside vLLM; [] if there is none.

    vLLM's own code is known by its version. That of plug-ins, of models and attention back ends
    that are registered from elsewhere, and of another platform is known by its files.

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
    names = [f"transformers {transformers.__version__}"] if _uses_transformers(classes) else []
    return [*names, digest] if digest else names


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
