"""Reads a checkpoint's directory, and refuses what would be served as another model.

transformers completes a checkpoint that lacks weights with random ones, ignores weights that the
configuration has no layer for, and can run code that lies beside them. Here each of these is a
``ConfigError``: KV must depend on nothing but the files that its name was computed from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvtier.engine.paged import ATTENTION
from kvtier.errors import ConfigError, printable

MAX_NAMED = 3
"""Tensors that a message names; the rest is counted."""


def read_config(directory: Path) -> PreTrainedConfig:
    """Return the configuration in ``config.json``; code of the checkpoint's own never runs."""
    path = directory / "config.json"
    raw = _read_object(path)
    kind = raw.get("model_type")
    if "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model: {path} has the type {kind!r}, which is known only to code in the checkpoint "
            "(auto_map); kvtier does not run such code: choose a model of a type that "
            "transformers has"
        )
    if (directory / "adapter_config.json").exists():
        raise ConfigError(
            f"model: {directory} has an adapter beside the model (adapter_config.json); the "
            "embedded engine serves no adapters: merge it into the weights, or remove it"
        )
    with reading(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return config


def read_weights(directory: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with weights that all come from files of ``directory``.

    Raises ``ConfigError`` where files and configuration don't have the same tensors.
    """
    module: PreTrainedModel
    loaded: Mapping[str, Iterable[Any]]
    with reading(f"the weights in {directory}"):
        module, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    mismatched = [
        f"{key} ({list(in_file)} in the file, {list(expected)} by config.json)"
        for key, in_file, expected in loaded["mismatched_keys"]
    ]
    faults = {
        "lacks": loaded["missing_keys"],
        "has weights of another shape than its config.json says:": mismatched,
        "has weights that its config.json has no place for:": _unused(
            loaded["unexpected_keys"], config
        ),
    }
    for what, keys in faults.items():
        if keys:
            raise ConfigError(
                f"model: {directory} {what} {_listed(keys)}; give the whole checkpoint, with the "
                "config.json that belongs to it"
            )
    return module


def read_eos_token_ids(directory: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of ``generation_config.json``, if it has any."""
    found = getattr(config, "eos_token_id", None)
    path = directory / "generation_config.json"
    if path.is_file():
        own = _read_object(path).get("eos_token_id")
        found = found if own is None else own
    if found is None:
        return ()
    ids = found if isinstance(found, list | tuple) else [found]
    for each in ids:
        if not isinstance(each, int) or isinstance(each, bool):
            raise ConfigError(
                f"model: eos_token_id in {path} is {found!r}; it has to be a token id or a list of "
                "token ids"
            )
    return tuple(ids)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever a library raises over a file into a ``ConfigError`` of one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # libraries raise what they like: KeyError, SafetensorError, ...
        first_line = str(error).strip().partition("\n")[0].rstrip(".:")
        reason = printable(f"{type(error).__name__}: {first_line}")
        raise ConfigError(
            f"model: {what} can't be read ({reason}); it may be damaged, cut off or missing: fetch "
            "it again"
        ) from error


def _read_object(path: Path) -> Mapping[str, object]:
    with reading(path):
        raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ConfigError(f"model: {path} has to hold a JSON object")
    return raw


def _unused(keys: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """Leave out layers that predict further tokens: they come after those of the model."""
    first = config.num_hidden_layers
    further = getattr(config, "num_nextn_predict_layers", 0) or 0
    known = tuple(f"model.layers.{at}." for at in range(first, first + further))
    return [key for key in keys if not key.startswith(known)]


def _listed(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return printable(", ".join(names[:MAX_NAMED])) + more
