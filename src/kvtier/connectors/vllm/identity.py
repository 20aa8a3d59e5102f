"""What must agree before two vLLM processes may share a chunk of KV.

vLLM's keys name a prompt's tokens, its adapter, images and salt, and the KV group. What else there
is that decides on the bytes of a chunk is named here: whatever differs is a miss, never wrong KV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from kvtier.keys import Namespace, next_key
from kvtier.types import BlockKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

READ_WHOLE = ("config.json", "quantize_config.json", "hf_quant_config.json", "adapter_config.json")
"""Files of a model that are small and say how it is computed: their content counts."""
LISTED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".py")
"""Weights and code: of these files name, size and time of change count."""


def namespace(
    config: OffloadingConfig, row_bytes: int, engine: str, revision: str = "", salt: str = ""
) -> Namespace:
    """The namespace of an engine's chunks. Reads files of a model that lies in a local folder.

    row_bytes: what is kept of a chunk, of all ranks that keep it together. engine: name and version
    of what computes the KV. revision: what else the caller knows of how the model is computed.
    salt: separates tenants, or what nobody here knows of.
    """
    return Namespace(
        model=_place(config.model.name),
        revision=f"{engine} {revision} {model_fingerprint(config.model.name)}",
        dtype=config.model.dtype,
        layout=_layout(config, row_bytes),
        block_size=config.cache.tokens_per_hash,
        salt=salt,
    )


def chunk_key(digest: bytes, key: bytes) -> BlockKey:
    """What a chunk is called outside the process. digest: of its namespace. key: vLLM's."""
    return next_key(digest, key)


def model_fingerprint(model: str) -> str:
    """Changes when the files of a local model do, or the commit that a hub's name stands for.

    A name that is not here, neither as a folder or file nor in the hub's cache, has "".
    """
    path = Path(model)
    if path.is_dir():
        return _digest(line for file in sorted(path.iterdir()) for line in _traits(file))
    if path.is_file():
        return _digest(_stat(path))
    try:
        return (_hub_folder(model) / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _place(model: str) -> str:
    """A folder by its real path: a link that was moved on is another model."""
    return os.path.realpath(model) if os.path.exists(model) else model


def _layout(config: OffloadingConfig, row_bytes: int) -> str:
    """Names how a chunk's bytes are arranged, over ranks, groups and layers."""
    parallel = config.parallel
    facts = {
        "row_bytes": row_bytes,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "kv_cache_layout": config.kv_cache_layout,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "ranks": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
    }
    return _digest([json.dumps(facts, sort_keys=True).encode()])


def _traits(file: Path) -> Iterable[bytes]:
    if file.name in READ_WHOLE and file.is_file():
        yield file.name.encode()
        yield file.read_bytes()
    elif file.suffix in LISTED:
        yield from _stat(file)


def _stat(file: Path) -> Iterable[bytes]:
    try:
        found = file.stat()
    except OSError:  # a link to what was not fetched
        yield file.name.encode()
    else:
        yield f"{file.name} {found.st_size} {found.st_mtime_ns}".encode()


def _hub_folder(model: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / (
        "models--" + model.replace("/", "--")
    )


def _digest(pieces: Iterable[bytes]) -> str:
    """Each piece with its length, so that none runs on into the next."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(len(piece).to_bytes(8, "little"))
        hasher.update(piece)
    return hasher.hexdigest()
