"""Names of models, built-in or local. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path

BUILTIN = Path(__file__).parent / "builtin"


class RandomName(StrEnum):
    """Models that are generated on request; see ``random_models``."""

    GQA = "random-gqa"
    LLAMA = "random-llama"
    MLA = "random-mla"
    LLAMA_8B = "random-8b"


def find_model(name: str) -> Path | RandomName:
    """Return the directory of the model ``name``, or the name of a generated model.

    Raises ``ConfigError`` if there is no such model.
    """
    if name in list(RandomName):
        return RandomName(name)
    directory = BUILTIN / name if (BUILTIN / name).is_dir() else user_path(name)
    if not (directory / "config.json").is_file():
        known = ", ".join(sorted([*(path.name for path in BUILTIN.glob("*")), *RandomName]))
        raise ConfigError(
            f"model: {name!r} is neither built in ({known}) nor a directory with a config.json; "
            "models are not downloaded, give a local path"
        )
    return directory
