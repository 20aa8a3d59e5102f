"""Facts that must agree before two SGLang processes may share a page of KV.

SGLang's keys cover a prompt's tokens, the request's ``extra_key`` (which includes an adapter) and
its ``cache_salt``. The namespace made here covers everything else that decides on the bytes of a
page. A difference is a miss, never wrong KV.
"""

from __future__ import annotations

import json
import os
import struct
from binascii import unhexlify
from collections.abc import Sequence
from contextlib import suppress

from blake3 import blake3

from kvtier.connectors.common.weights import MODEL_FILES, Source
from kvtier.connectors.sglang.shared.ranks import RankConfig, is_replicated
from kvtier.core.keys import Namespace

FROM_FILES = MODEL_FILES | {"layered"}
"""SGLang load formats that read only the model's own files."""
MODEL_TRAITS = (
    "context_length", "dtype", "json_model_override_args", "kv_cache_dtype", "load_format",
    "model_impl", "model_loader_extra_config", "quantization", "quantization_param_path",
    "speculative_algorithm", "speculative_draft_model_quantization", "torchao_config",
)  # fmt: skip
"""SGLang options that change the bytes of KV and are neither in the model's files nor visible in a
pool. An option that a version lacks is None for all processes of that version."""
POOL_FACTS = (
    "dtype", "end_layer", "head_dim", "head_num", "kv_cache_dim", "layer_num", "layout",
    "page_size", "start_layer", "storage_format_tag", "target_layer_num", "v_head_dim",
)  # fmt: skip
RANK_FACTS = (
    "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "is_mla_model", "pp_rank", "pp_size",
    "should_split_heads", "tp_lcm_size", "tp_size",
)  # fmt: skip

TENSOR_FACTS = ("head_num", "should_split_heads", "tp_lcm_size", "tp_size")
"""Those of both that differ between tensor parallel sizes."""

KEY_BYTES = 32


def engine_digest(weights: str, version: str, options: object, salt: str, code: str = "") -> bytes:
    """Return a digest of the model as one engine computes it, regardless of pools: 32 bytes.

    Args:
        weights: digest of the model's files.
        version: SGLang's version.
        options: SGLang's ``ServerArgs``, or None.
        salt: the namespace setting.
        code: identifies the code from outside SGLang.
    """
    traits = {name: getattr(options, name, None) for name in MODEL_TRAITS}
    return Namespace(
        model=weights,
        revision=f"sglang {version} {code}".rstrip(),
        dtype="",
        layout=json.dumps(traits, sort_keys=True, default=str),
        block_size=0,
        salt=salt,
    ).digest


def pool_facts(
    config: RankConfig,
    name: str,
    pool: object,
    sizes: Sequence[object],
    any_size: bool = False,
) -> bytes:
    """Return what decides on the bytes of one pool's pages on one rank, besides the engine.

    Args:
        config: the rank.
        name: name of the pool.
        pool: SGLang's pool.
        sizes: sizes of a page's pieces in order, with their kinds if these differ.
        any_size: whether pages are shared with engines of other tensor parallel sizes. The names of
            their shards contain heads and sizes then.
    """
    left_out = TENSOR_FACTS if any_size else ()
    ranks = {each: getattr(config, each, None) for each in RANK_FACTS if each not in left_out}
    if not any_size:
        ranks["tp_rank"] = 0 if is_replicated(config, name) else config.tp_rank
    facts = {
        "pool": [name, type(pool).__name__, [] if any_size else list(sizes)],
        "bytes": {
            each: str(getattr(pool, each, None)) for each in POOL_FACTS if each not in left_out
        },
        "ranks": ranks,
    }
    return json.dumps(facts, sort_keys=True).encode()


def sources(options: object, config: RankConfig) -> Sequence[Source]:
    """Return the sources of SGLang's weights, draft models included.

    options: SGLang's ``ServerArgs``; None if unknown: the model's name is then the only source.
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
    """Return SGLang's keys, which are digests in hex, as 32 bytes each."""
    joined = " ".join(keys)
    if joined[2 * KEY_BYTES :: 2 * KEY_BYTES + 1] == " " * (len(keys) - 1):  # all of one length
        with suppress(ValueError):
            packed = bytes.fromhex(joined)  # skips blanks
            if len(packed) == KEY_BYTES * len(keys):
                return list(struct.unpack(f"{KEY_BYTES}s" * len(keys), packed))
    return [_page_key(key) for key in keys]


def _page_key(key: str) -> bytes:
    if len(key) == 2 * KEY_BYTES:
        with suppress(ValueError):
            return unhexlify(key)
    return blake3(key.encode()).digest()
