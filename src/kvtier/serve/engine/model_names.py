"""Names of models: built-in, local, or of the Hugging Face hub. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.serve.engine.hub import download, is_hub_name

BUILTIN = Path(__file__).parent / "builtin"
DEFAULT = "kvtier-tiny"
"""The built-in model, and the package with it where kvtier was installed without."""


class RandomName(StrEnum):
    """Models that are generated on request; see ``random_models``."""

    GQA = "random-gqa"
    LLAMA = "random-llama"
    MLA = "random-mla"
    LLAMA_8B = "random-8b"


def find_model(name: str, revision: str = "") -> Path | RandomName:
    """Return the directory of the model ``name``, or the name of a generated model.

    Models of the Hugging Face hub are downloaded, see ``hub.download``.

    Raises ``ConfigError`` if there is no such model.
    """
    found = find_local(name, revision)
    return download(name, revision) if found is None else found


def find_local(name: str, revision: str = "") -> Path | RandomName | None:
    """Return what ``find_model`` does, or None for a name of the hub; nothing is downloaded."""
    directory = BUILTIN / name if (BUILTIN / name).is_dir() else user_path(name)
    is_random = name in list(RandomName)
    has_builtin = (BUILTIN / DEFAULT).is_dir()
    if not has_builtin and (is_random or (name == DEFAULT and not directory.exists())):
        raise ConfigError(
            f"model: {name!r} needs the package {DEFAULT}, which is not installed: pip install "
            f"{DEFAULT}, or give a local directory or a name of the Hugging Face hub (OWNER/NAME)"
        )
    if not (is_random or directory.exists()) and is_hub_name(name):
        return None
    if revision:
        raise ConfigError(
            f"revision: {revision!r} with the model {name!r}, which is local; leave it out, or "
            "give a name of the Hugging Face hub (OWNER/NAME)"
        )
    if is_random:
        return RandomName(name)
    if not (directory / "config.json").is_file():
        known = ", ".join(sorted([*(path.name for path in BUILTIN.glob("*")), *RandomName]))
        raise ConfigError(
            f"model: {name!r} is neither built in ({known}) nor a directory with a config.json, "
            "nor a name of the Hugging Face hub (OWNER/NAME)"
        )
    return directory
