"""Compute the KV of prompts by the embedded engine, for ``kvtier export``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.config import CacheConfig, CodingConfig
from kvtier.core.errors import CacheError, ConfigError, printable
from kvtier.core.keys import grid_labels
from kvtier.core.system.user_paths import user_path
from kvtier.tiers.remote.bucket.pack_file import (
    Note,
    PackFileIndex,
    refuse_existing,
    write_pack_file,
)
from kvtier.tiers.remote.bucket.signing import Signer
from kvtier.tiers.remote.pack_files import scratch_store
from kvtier.tools.cli.serving import check_engine

if TYPE_CHECKING:
    from kvtier.serve.engine import Engine, EngineConfig

LINES: Final = ".jsonl"
COMPUTE_S: Final = 3600.0
WRITE_S: Final = 600.0
"""Longest wait until the blocks of a prompt are written."""


def export_prompts(
    prompts: Path,
    path: Path,
    config: EngineConfig,
    coding: CodingConfig,
    note: Note,
    *,
    about: str = "",
    signer: Signer | None = None,
) -> PackFileIndex:
    """Compute prompts one after the other, and write their KV into a pack file.

    All prompts are checked before the first one is computed.

    Args:
        prompts: file of prompts.
        path: file to write.
        config: of the engine; its cache is replaced.
        coding: codec and keys of the blocks in the file.
        note: called as prompts are done.
        about: text that messages about the file show.
        signer: signs the file; None for no signature.

    Raises ``ConfigError`` for prompts that can't be read, or that are too short or too long.
    """
    refuse_existing(path)
    requests = list(_requests(prompts))
    with scratch_store(path) as (url, folder):
        cache = CacheConfig(
            host_capacity="2x",  # any prompt fits, and is written before the next one begins
            eviction_policy="lru",
            storage=(url,),
            codec=coding.codec,
            encryption_key=coding.encryption_key,
        )
        config = replace(config, cache=cache)
        check_engine(config)
        from kvtier.serve.engine import Engine

        with Engine(config) as engine:
            tokens = [_tokens(engine, where, fields) for where, fields in requests]
            for at, (request, some) in enumerate(zip(requests, tokens, strict=True)):
                note(at, len(tokens))
                _compute(engine, request[0], some)
            note(len(tokens), len(tokens))
            identity = engine.kv_identity
        return write_pack_file(
            path,
            folder,
            about=about,
            identity=identity,
            num_prompts=len(tokens),
            num_tokens=sum(map(len, tokens)),
            signer=signer,
        )


def _requests(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the requests of a file, and the place of each for messages.

    Raises ``ConfigError`` if there is none, or if one can't be read.
    """
    try:
        text = user_path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; give text") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a file of prompts, or the URL of a store"
        ) from None
    if not text.strip():
        raise ConfigError(f"{path}: has no prompt; write at least one into it")
    if path.suffix != LINES:
        yield str(path), {"prompt": text}
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: is no JSON ({error}); write a request per line") from None
        if not isinstance(fields, dict) or ("prompt" in fields) is ("messages" in fields):
            raise ConfigError(f'{where}: has neither "prompt" nor "messages", or both; give one')
        yield where, fields


def _tokens(engine: Engine, where: str, fields: Mapping[str, Any]) -> Sequence[int]:
    """Return the tokens of a request as the server would.

    Raises ``ConfigError`` for one that the server would refuse, or of which it would keep nothing.
    """
    tokens = _encoded(engine, where, fields)
    info = engine.info
    if not len(grid_labels(tokens, info.block_size, info.chunk_tokens)):
        raise ConfigError(
            f"{where}: the prompt has {len(tokens)} tokens, and only whole chunks of "
            f"{info.chunk_tokens} are kept; leave it out, or lower chunk_tokens here and in "
            "kvtier serve"
        )
    if len(tokens) >= info.max_model_tokens:
        raise ConfigError(
            f"{where}: the prompt has {len(tokens)} tokens, and there is room for "
            f"{info.max_model_tokens - 1}; shorten it.{info.context_note}"
        )
    return tokens


def _encoded(engine: Engine, where: str, fields: Mapping[str, Any]) -> Sequence[int]:
    from pydantic import ValidationError

    from kvtier.serve.server.chat import render
    from kvtier.serve.server.errors import ApiError, from_validation
    from kvtier.serve.server.schemas import ChatRequest

    if "prompt" in fields:
        prompt = fields["prompt"]
        if isinstance(prompt, str):
            return engine.tokenizer.encode(prompt, special_tokens=True)
        vocab_size = engine.info.vocab_size
        if isinstance(prompt, list) and all(
            type(token) is int and 0 <= token < vocab_size for token in prompt
        ):
            return prompt
        raise ConfigError(
            f'{where}: "prompt" is neither a text nor a list of token ids below {vocab_size}'
        )
    if not engine.tokenizer.has_chat_template:
        raise ConfigError(
            f"{where}: {engine.info.model_name} has no chat template; give its text as prompt"
        )
    try:
        asked = ChatRequest.model_validate({**fields, "model": engine.info.model_name})
        return engine.tokenizer.encode(render(asked, engine.tokenizer))
    except ValidationError as error:
        raise ConfigError(f"{where}: {from_validation(error.errors()).message}") from None
    except ApiError as error:
        raise ConfigError(f"{where}: {printable(error.message)}") from None


def _compute(engine: Engine, where: str, tokens: Sequence[int]) -> None:
    """Compute a prompt. Returns when all of its blocks are in storage."""
    from kvtier.serve.engine import SamplingParams

    info, cache = engine.info, engine.cache
    done = engine.submit(tokens, SamplingParams(max_tokens=1, ignore_eos=True)).result(COMPUTE_S)
    if done.error:
        raise CacheError(f"{where}: {done.error}")
    engine.drain(WRITE_S)
    labels = grid_labels(tokens, info.block_size, info.chunk_tokens)
    num, _ = engine.call(lambda: cache.stored(engine.namespace_of(""), labels))
    if num < len(labels):
        raise CacheError(
            f"{where}: {len(labels) - num} of {len(labels)} blocks could not be written; is the "
            "disk full?"
        )
