"""Find the files of an engine's weights, or the reason why they are unknown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.identity import Basis, Identification, Identity, process_start_ns, unknown

MODEL_FILES = frozenset({
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "mistral", "npcache",
    "pt", "runai_streamer", "safetensors", "sharded_state",
})  # fmt: skip
"""Load formats, of all engines, that read only the model's own files."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a model's weights, as configured in the engine.

    Attributes:
        model: a folder, a file, or a name on the hub.
        revision: "" for the newest.
        download_dir: folder of the hub's files; "" for the hub's own cache.
        load_format: the engine's load format.
        is_in_files: whether the engine reads only the model's own files.
        has_other_hub: whether the name is one of a hub that is not supported here.
    """

    model: str
    revision: str = ""
    download_dir: str = ""
    load_format: str = "auto"
    is_in_files: bool = True
    has_other_hub: bool = False


def identify(sources: Sequence[Source], namespace: str = "") -> Identification | Identity:
    """Return the identity of models that are used together, from all their files.

    If the weights are in no known files, it is an identity by name if the user gave a ``namespace``
    (which asserts that they do not change), otherwise one that no other process has.
    """
    places: list[Path] = []
    for source in sources:
        place = find_files(source)
        if place is None and namespace:
            return Identity(f"called {sources}", Basis.GIVEN)
        if place is None:
            return unknown(
                f"weights of {source.model!r} (load format {source.load_format!r}) are in no file "
                "that can be found; if they stay the same, say so by the setting 'namespace'"
            )
        places.append(place)
    # Connectors are made after the weights were loaded, so local files that changed since the
    # process began can't be trusted. The hub's cache is never changed in place, and is often
    # downloaded at that start.
    is_local = any(os.path.exists(source.model) for source in sources)
    return Identification(places, since_ns=process_start_ns() if is_local else None)


def find_files(source: Source) -> Path | None:
    """Return the folder or file of a source; None if it is in none that can be found here."""
    if not source.is_in_files:
        return None
    if os.path.exists(source.model):
        return Path(source.model)
    if "://" in source.model or source.has_other_hub:
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    # A GGUF file of a repository is called org/name:quantisation, or org/name/file.gguf.
    name = "/".join(source.model.partition(":")[0].split("/")[:2])
    try:
        found = snapshot_download(
            name,
            revision=source.revision or None,
            cache_dir=source.download_dir or None,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the cache, or no name of the hub
        return None
    return Path(found)
