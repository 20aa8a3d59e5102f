"""Facts that must agree before two SGLang processes may share a page of KV.

SGLang's keys name a prompt's tokens, the request's ``extra_key`` (an adapter is in it) and its
``cache_salt``, and nothing else. What else decides on the bytes of a page is named here: whatever
differs is a miss, never wrong KV.
"""

from __future__ import annotations

import json
import os
import struct
from binascii import unhexlify
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from blake3 import blake3

from kvtier.connectors.common.weights import Source
from kvtier.keys import Namespace

FROM_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats of SGLang's that read the model's own files, and nothing else."""
MODEL_TRAITS = (
    "context_length",
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "model_impl",
    "model_loader_extra_config",
    "quantization",
    "quantization_param_path",
    "speculative_algorithm",
    "speculative_draft_model_quantization",
    "torchao_config",
)
"""SGLang options that change the bytes of KV and are neither in the model's files nor visible in a
pool. An option that a version lacks has one value for all who run that version."""
POOL_FACTS = (
    "dtype",
    "end_layer",
    "head_dim",
    "head_num",
    "kv_cache_dim",
    "layer_num",
    "layout",
    "page_size",
    "start_layer",
    "storage_format_tag",
    "target_layer_num",
    "v_head_dim",
)
RANK_FACTS = (
    "attn_cp_rank",
    "attn_cp_size",
    "dcp_rank",
    "dcp_size",
    "is_mla_model",
    "pp_rank",
    "pp_size",
    "should_split_heads",
    "tp_lcm_size",
    "tp_size",
)

KEY_BYTES = 32
SHARDED_STATE = "mamba"
"""A pool that is cut over ranks also where KV is not."""


class StorageConfig(Protocol):
    """The part of SGLang's ``HiCacheStorageConfig`` that kvtier uses."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    model_name: str | None
    extra_config: Mapping[str, object] | None


def is_replicated(config: StorageConfig, name: str) -> bool:
    """Whether all ranks of a tensor-parallel group have the same bytes in a pool.

    The first one stores them for all then.
    """
    return config.is_mla_model and name != SHARDED_STATE


def engine_digest(weights: str, version: str, options: object, salt: str) -> bytes:
    """32 bytes that name a model as one engine computes it, whatever its pools are.

    weights: digest of its files. version: SGLang's. options: its ``ServerArgs``, or None.
    """
    traits = {name: getattr(options, name, None) for name in MODEL_TRAITS}
    return Namespace(
        model=weights,
        revision=f"sglang {'.'.join(version.split('.')[:3])}",
        dtype="",
        layout=json.dumps(traits, sort_keys=True, default=str),
        block_size=0,
        salt=salt,
    ).digest


def pool_facts(config: StorageConfig, name: str, pool: object, sizes: Sequence[object]) -> bytes:
    """All that decides on the bytes of one pool's pages on one rank, beside the engine.

    sizes: of the pieces of a page, in their order; with their kinds where these differ.
    """
    rank = 0 if is_replicated(config, name) else config.tp_rank
    facts = {
        "pool": [name, type(pool).__name__, list(sizes)],
        "bytes": {each: str(getattr(pool, each, None)) for each in POOL_FACTS},
        "ranks": {each: getattr(config, each, None) for each in RANK_FACTS} | {"tp_rank": rank},
    }
    return json.dumps(facts, sort_keys=True).encode()


def sources(options: object, config: StorageConfig) -> Sequence[Source]:
    """Return the sources of SGLang's weights, draft models included.

    options: SGLang's ``ServerArgs``; None if they are unknown, and the model's name has to do.
    """
    if options is None:
        return [Source(config.model_name or "")]
    names = [(getattr(options, "model_path", ""), getattr(options, "revision", None))]
    if draft := getattr(options, "speculative_draft_model_path", None):
        names.append((draft, getattr(options, "speculative_draft_model_revision", None)))
    load_format = str(getattr(options, "load_format", "auto"))
    return [
        Source(
            name,
            revision or "",
            getattr(options, "download_dir", None) or "",
            load_format,
            is_in_files=load_format.rpartition(".")[2].lower() in FROM_FILES,
            has_other_hub=os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"),
        )
        for name, revision in names
    ]


def page_keys(keys: Sequence[str]) -> list[bytes]:
    """Keys of SGLang's, 32 bytes each: they are digests of so many already, in hex."""
    joined = " ".join(keys)
    if joined[2 * KEY_BYTES :: 2 * KEY_BYTES + 1] == " " * (len(keys) - 1):  # all of one length
        with suppress(ValueError):
            packed = bytes.fromhex(joined)  # which passes over blanks
            if len(packed) == KEY_BYTES * len(keys):
                return list(struct.unpack(f"{KEY_BYTES}s" * len(keys), packed))
    return [_page_key(key) for key in keys]


def _page_key(key: str) -> bytes:
    if len(key) == 2 * KEY_BYTES:
        with suppress(ValueError):
            return unhexlify(key)
    return blake3(key.encode()).digest()


def folder_of(config: StorageConfig, name: str, replica: int = 0) -> str:
    """Return the name of a slab's folder.

    Replicas, pools, and ranks with pages of their own have one each. replica: of engines that share
    nothing; beside it, attention may be data parallel (``dp_rank``).
    """
    tp_rank = 0 if is_replicated(config, name) else config.tp_rank
    parts = [
        ("replica", replica, replica + 1),
        ("dp", dp_rank := getattr(config, "dp_rank", 0), dp_rank + 1),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
        ("tp", tp_rank, config.tp_size),
    ]
    place = "-".join(f"{part}{rank}" for part, rank, size in parts if size > 1) or "rank0"
    return f"{place}-{name}"
