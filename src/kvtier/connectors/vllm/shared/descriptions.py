"""Descriptions of blocks as vLLM's own KV events have them, for routers that know only tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvtier.connectors.vllm.shared.prompt import RequestBlocks, group_of
from kvtier.core.keys import TOKEN_DTYPE
from kvtier.node.client.cache import NodeCache
from kvtier.node.wire.protocol import MAX_EXTRA_BYTES, DescribeNotice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvtier.connectors.vllm.shared.names import EngineFacts

MAX_RUN = 1 << 10
"""Blocks of one message to a node."""
DYNAMO_SALT = "dynamo-cache-salt:"
"""Dynamo's front end puts it before the salts of its users. Its indexer knows them without."""


@dataclass(frozen=True, slots=True)
class Description:
    """Blocks of a prompt one behind the other, as vLLM publishes them, without their place.

    Attributes:
        hashes: Hashes of the pages that the blocks are made of, as vLLM publishes them.
        parent: Hash before the first of them; None at the beginning of a prompt.
        tokens: Their token ids.
        lora: Number and name of the adapter.
        extra_keys: Of each hash, what it covers besides tokens: adapter, salt, media.
    """

    hashes: Sequence[object]
    parent: object
    tokens: Sequence[int]
    lora: tuple[int | None, str | None]
    extra_keys: Sequence[tuple[Any, ...] | None]

    @classmethod
    def of(cls, request: Any, tokens_per_hash: int, begin: int, end: int) -> Description:
        """Describe a part of a prompt. begin, end: its tokens, whole pages."""
        first, last = begin // tokens_per_hash, end // tokens_per_hash
        hashes, lora = request.block_hashes, request.lora_request
        extra_keys: list[tuple[Any, ...] | None] = [None] * (last - first)
        if _has_extra_keys(request):
            bounds = range(begin, end, tokens_per_hash)
            extra_keys = [_extra_keys(request, at, at + tokens_per_hash) for at in bounds]
        return cls(
            [published_hash(each) for each in hashes[first:last]],
            published_hash(hashes[first - 1]) if first else None,
            array("i", request.all_token_ids[begin:end]),
            (lora.adapter_id, lora.name) if lora else (None, None),
            extra_keys,
        )


def published_hash(block_hash: bytes) -> int | bytes:
    """Return a hash as vLLM publishes it: by default, an integer of 64 bits."""
    found: int | bytes = kv_cache_utils.maybe_convert_block_hash(
        kv_cache_utils.BlockHash(block_hash)
    )
    return found


def kind_of_group(spec: object) -> str | None:
    """Return vLLM's name for a KV group's kind of attention; None before 0.23."""
    kind_of_spec = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    return None if kind_of_spec is None else str(kind_of_spec(spec).value)


def event_extra_keys(
    extra_keys: Sequence[tuple[Any, ...] | None],
) -> list[tuple[Any, ...] | None] | None:
    """Return extra keys as events have them: without tags, which they have from vLLM 0.31 on."""
    if not any(extra_keys):
        return None
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)
    found: list[tuple[Any, ...] | None] | None = untag(extra_keys)
    return found


def _has_extra_keys(request: Any) -> bool:
    if getattr(request, "prompt_embeds", None) is not None:
        return True
    return bool(request.lora_request or request.cache_salt or request.mm_features)


def _extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    found: tuple[Any, ...] | None
    found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    return found


class NodeDescriber:
    """Describes blocks to a node that publishes events, while their request is at hand.

    Args:
        cache: The engine's cache in the node.
        facts: Sizes of the engine's blocks and hashes.
        config: vLLM's configuration.
        specs: vLLM's description of each of its KV groups.
    """

    def __init__(
        self, cache: NodeCache, facts: EngineFacts, config: VllmConfig, specs: Sequence[object]
    ) -> None:
        self._cache = cache
        self._tokens_per_hash = facts.tokens_per_hash
        self._block_tokens = {
            group.group_id: group.tokens_per_page * facts.pages_per_block for group in facts.groups
        }
        self._kinds = {group: kind_of_group(specs[group]) for group in self._block_tokens}
        self._model = str(config.model_config.served_model_name)

    def describe(self, keys: Iterable[bytes], request: RequestBlocks) -> None:
        """Describe those of a request's blocks that the node may not know yet."""
        if self._cache.wants_descriptions and request.source is not None:
            for run, begin in self._runs(self._cache.undescribed(keys), request):
                notice = self._notice(run, begin, request)
                if notice is not None:
                    self._cache.describe(run, notice)

    def _runs(
        self, keys: Sequence[bytes], request: RequestBlocks
    ) -> Iterator[tuple[list[bytes], int]]:
        """Yield blocks one behind the other, and the token that the first one begins with."""
        run: list[bytes] = []
        begin = next_end = -1
        for key in keys:
            num, end = self._block_tokens[group_of(key)], request.ends.get(key, 0)
            if end < num or end % self._tokens_per_hash:
                continue  # the end of a prompt with recurrent layers: routers know whole blocks
            is_next = end == next_end and group_of(key) == group_of(run[-1]) and len(run) < MAX_RUN
            if not is_next:
                if run:
                    yield run, begin
                run, begin = [], end - num
            run.append(key)
            next_end = end + num
        if run:
            yield run, begin

    def _notice(
        self, keys: Sequence[bytes], begin: int, request: RequestBlocks
    ) -> DescribeNotice | None:
        group, source = group_of(keys[0]), request.source
        end = begin + len(keys) * self._block_tokens[group]
        found = Description.of(source, self._tokens_per_hash, begin, end)
        parent, *hashes = map(_packed, [found.parent, *found.hashes])
        extra_keys = event_extra_keys(found.extra_keys)
        encoded = b"" if extra_keys is None else msgspec.msgpack.encode(extra_keys)
        if len(encoded) > MAX_EXTRA_BYTES * len(hashes):
            return None
        lora_id, lora_name = found.lora
        salt = source.cache_salt
        return DescribeNotice(
            partition=0,
            keys=b"",
            model=self._model[:256],
            block_size=self._tokens_per_hash,
            hash_bytes=len(hashes[0]),
            hashes=b"".join(hashes),
            parent=parent,
            tokens=np.asarray(found.tokens, TOKEN_DTYPE).tobytes(),
            group=group,
            kind=self._kinds[group],
            salt=salt and salt.removeprefix(DYNAMO_SALT),
            lora_id=lora_id,
            lora_name=lora_name,
            extra_keys=encoded,
        )


def _packed(published: object) -> bytes:
    if isinstance(published, int):
        return published.to_bytes(8, "little")
    return published if isinstance(published, bytes) else b""
