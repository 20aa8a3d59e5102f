"""Find the files of an engine's weights, or the reason why they are unknown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.identity import Basis, Identification, Identity, process_start_ns, unknown


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a model's weights, as the engine was told.

    model: a folder, a file, or a name on the hub. revision: "" for the newest. download_dir: folder
    of the hub's files; "" for the hub's own cache. is_in_files: the engine reads the model's own
    files, and nothing else. has_other_hub: names are those of a hub that is not asked here.
    """

    model: str
    revision: str = ""
    download_dir: str = ""
    load_format: str = "auto"
    is_in_files: bool = True
    has_other_hub: bool = False


def identify(sources: Sequence[Source], namespace: str = "") -> Identification | Identity:
    """Return the identity of models that are used together, from all their files.

    If the weights are in no known files: an identity by name if the user gave a ``namespace``, and
    thereby says that they stay the same; else one that no other process has.
    """
    places: list[Path] = []
    for source in sources:
        place = _place(source)
        if place is None and namespace:
            return Identity(f"called {sources}", Basis.GIVEN)
        if place is None:
            return unknown(
                f"weights of {source.model!r} (load format {source.load_format!r}) are in no file "
                "that can be found; if they stay the same, say so by the setting 'namespace'"
            )
        places.append(place)
    # Connectors are made when weights are loaded already. Of files that changed since the process
    # began nobody can say what they held then. What the hub's cache has is never changed in place,
    # and is often fetched at that very start.
    is_local = any(os.path.exists(source.model) for source in sources)
    return Identification(places, since_ns=process_start_ns() if is_local else None)


def _place(source: Source) -> Path | None:
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
    except (OSError, ValueError):  # not there, or no name of the hub's
        return None
    return Path(found)
