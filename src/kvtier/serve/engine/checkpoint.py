"""Reads a checkpoint's directory, and refuses it if it would be served as another model.

transformers fills in missing weights at random, ignores weights without a layer in the
configuration, and can run code from the checkpoint. Here each of these is a ``ConfigError``: KV
must depend only on the files that its name was computed from.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvtier.core.errors import ConfigError, printable
from kvtier.identity import is_counted

MAX_NAMED = 3
"""Tensors that a message names; the rest is counted."""

MAX_REASON = 300
"""Characters of a library's own message."""


def read_config(directory: Path) -> PreTrainedConfig:
    """Return the configuration in ``config.json``; code from the checkpoint never runs."""
    path = directory / "config.json"
    raw = _read_object(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(
            f"model: {path} has the model_type {kind!r}; it has to be the name of a type of model"
        )
    if kind not in CONFIG_MAPPING:
        known = (
            "known only to code in the checkpoint (auto_map), and kvtier does not run such code"
            if "auto_map" in raw
            else "unknown to the installed transformers"
        )
        raise ConfigError(
            f"model: {path} has the model_type {kind!r}, which is {known}; choose a model of a "
            "type that transformers has"
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

    Raises ``ConfigError`` if files and configuration have different tensors.
    """
    _refuse_files_elsewhere(directory, config)
    module: PreTrainedModel
    loaded: Mapping[str, Iterable[Any]]
    with reading(f"the weights in {directory}"), _unmerged_named(directory):
        module, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            directory,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
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
            raise _unfit(directory, what, keys)
    return module


def read_eos_token_ids(directory: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer; ``generation_config.json`` takes precedence."""
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


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling settings of requests that give none; fields as in ``SamplingParams``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}
"""Least and greatest value of each of ``SamplingDefaults``."""


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling settings in ``generation_config.json``.

    As in vLLM and SGLang, ``do_sample`` is not read: a request says whether it samples.
    """
    path = directory / "generation_config.json"
    found = _read_object(path) if path.is_file() else {}
    given: dict[str, Any] = {}
    for name, (least, greatest) in BOUNDS.items():
        value: Any = found.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= greatest:
            raise ConfigError(
                f"model: {name} in {path} is {value!r}; it has to be a number in "
                f"{least:g} .. {greatest:g}, or left out"
            )
        given[name] = value
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))
    return SamplingDefaults(**given)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any exception of a library about a file into a ``ConfigError`` of one sentence."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # any type: KeyError, SafetensorError, ...
        why = " ".join(str(error).split()).rstrip(".:")
        if isinstance(error, UnpicklingError):  # torch advises to let the file run code
            why = "the file holds more than tensors"
        if len(why) > MAX_REASON:
            why = why[:MAX_REASON] + " ..."
        reason = printable(f"{type(error).__name__}: {why}")
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


def _refuse_files_elsewhere(directory: Path, config: PreTrainedConfig) -> None:
    """Refuse weights in files that the model's identity does not include."""
    named = {getattr(config, "transformers_weights", None): directory / "config.json"}
    for index in sorted(directory.glob("*.index.json")):
        files = _read_object(index).get("weight_map")
        if isinstance(files, dict):
            named.update(dict.fromkeys(map(str, files.values()), index))
    for name, by in named.items():
        if name and not (Path(name).name == name and is_counted(Path(name))):
            raise ConfigError(
                f"model: {by} names the file {name!r}; weights have to be files of {directory} "
                "itself, of a format that transformers writes: KV is named by these"
            )


@contextmanager
def _unmerged_named(directory: Path) -> Iterator[None]:
    """Report the names of tensors that transformers could not merge, such as those of experts.

    transformers names them only in its load report, which is filtered from the log because the
    ``ConfigError`` contains the names.
    """
    unmerged: list[str] = []

    def keep_out(record: logging.LogRecord) -> bool:
        report = record.getMessage()
        if " LOAD REPORT" not in report:
            return True
        unmerged.extend(re.findall(r"^(\S+(?:, \S+)*) *\|[^|]*CONVERSION", report, re.MULTILINE))
        return False

    logger = logging.getLogger(PreTrainedModel.__module__)
    logger.addFilter(keep_out)
    try:
        yield
    except RuntimeError as error:
        if unmerged:
            what = "lacks weights, or has some of another shape, that become"
            raise _unfit(directory, what, unmerged) from error
        raise
    finally:
        logger.removeFilter(keep_out)


def _unused(keys: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """Return the keys without layers that predict further tokens, which follow the model's own."""
    first = config.get_text_config(decoder=True).num_hidden_layers
    further = getattr(config, "num_nextn_predict_layers", None)
    further = further if isinstance(further, int) else 0
    known = tuple(f"model.layers.{at}." for at in range(first, first + further))
    return [key for key in keys if not key.startswith(known)]


def _unfit(directory: Path, what: str, keys: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"model: {directory} {what} {_listed(keys)}; give the whole checkpoint, with the "
        "config.json that belongs to it"
    )


def _listed(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return printable(", ".join(names[:MAX_NAMED])) + more
