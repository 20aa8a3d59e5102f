"""KV events of the tiers, in the words of vLLM's own events of its device memory.

A cache of keyed blocks knows hashes only. Routers that compute hashes of their own need the tokens,
too, which are at hand while a request is stored or looked up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvtier.connectors.vllm.shared.prompt import GROUP_BYTES, kind_of

if TYPE_CHECKING:
    from kvtier.cache.block_cache import Change
    from kvtier.connectors.vllm.shared.names import EngineFacts

MAX_KNOWN = 1 << 16
"""Blocks whose descriptions are remembered: 35 MB at 16 tokens per block."""


@dataclass(frozen=True, slots=True)
class Description:
    """A block as vLLM publishes it, without its place.

    Attributes:
        hashes: Hashes of the pages that the block is made of, as vLLM publishes them.
        parent: Hash before the first of them; None at the beginning of a prompt.
        tokens: Its token ids.
        lora: Number and name of its adapter.
        extra_keys: Of each hash, what it covers besides tokens: adapter, salt, media.
    """

    hashes: Sequence[object]
    parent: object
    tokens: Sequence[int]
    lora: tuple[int | None, str | None]
    extra_keys: Sequence[tuple[Any, ...] | None]


class TierEvents:
    """Describes blocks while their request is at hand, and turns changes of tiers into KV events.

    A block without a description is published by its hash alone. An earlier process has stored it,
    and no request has named it yet.

    Args:
        facts: Sizes of the engine's blocks and hashes.
        spec: vLLM's description of the one KV group.
    """

    def __init__(self, facts: EngineFacts, spec: object) -> None:
        (group,) = facts.groups
        self._tokens_per_hash = facts.tokens_per_hash
        tokens_per_block = group.tokens_per_page * facts.pages_per_block
        self._hashes_per_block = tokens_per_block // facts.tokens_per_hash
        kind_of_spec = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)  # from 0.23 on
        kind = None if kind_of_spec is None else kind_of_spec(spec).value
        self._group = _if_known(BlockStored, group_idx=0, kv_cache_spec_kind=kind)
        self._known: OrderedDict[bytes, Description] = OrderedDict()

    def describe(self, request: Any, key: bytes, end: int) -> None:
        """Remember what a block is. end: number of the request's tokens up to the block's end."""
        if key in self._known:
            self._known.move_to_end(key)
            return
        size, last = self._tokens_per_hash, end // self._tokens_per_hash
        first = last - self._hashes_per_block
        hashes, lora = request.block_hashes, request.lora_request
        self._known[key] = Description(
            [_published(hashes[at]) for at in range(first, last)],
            _published(hashes[first - 1]) if first else None,
            array("i", request.all_token_ids[first * size : end]),
            (lora.adapter_id, lora.name) if lora else (None, None),
            [_extra_keys(request, at * size, (at + 1) * size) for at in range(first, last)],
        )
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, change: Change) -> Iterator[KVCacheEvent]:
        """Yield the events of blocks that entered or left a tier."""
        medium, locality = kind_of(change.tier)
        place = {"medium": medium, **_if_known(BlockStored, locality=locality)}
        unknown = [_published(k[:-GROUP_BYTES]) for k in change.keys if k not in self._known]
        known = [self._known[key] for key in change.keys if key in self._known]
        if change.is_removed:
            removed = [one for block in known for one in block.hashes] + unknown
            yield BlockRemoved(removed, medium, **_if_known(BlockRemoved, locality=locality))
            return
        first = 0
        for end in range(1, len(known) + 1):
            if end == len(known) or known[end].parent != known[end - 1].hashes[-1]:
                yield self._stored(known[first:end], place)
                first = end
        if unknown:
            yield BlockStored(unknown, None, [], 0, None, lora_name=None, **place)

    def _stored(self, run: Sequence[Description], place: dict[str, Any]) -> KVCacheEvent:
        """Return the event of blocks one behind the other."""
        lora_id, lora_name = run[0].lora
        extra_keys = [keys for block in run for keys in block.extra_keys]
        return BlockStored(
            block_hashes=[one for block in run for one in block.hashes],
            parent_block_hash=run[0].parent,
            token_ids=[token for block in run for token in block.tokens],
            block_size=self._tokens_per_hash,
            lora_id=lora_id,
            lora_name=lora_name,
            **place,
            **self._group,
            **_if_known(BlockStored, extra_keys=_untagged(extra_keys)),
        )


def _if_known(event: type[KVCacheEvent], **fields: object) -> dict[str, Any]:
    """Return those of some fields that this version's event has."""
    known = event.__struct_fields__
    return {name: value for name, value in fields.items() if name in known}


def _published(block_hash: bytes) -> object:
    """Return a hash as vLLM publishes it: by default, an integer of 64 bits."""
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))


def _extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    found: tuple[Any, ...] | None
    found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    return found


def _untagged(extra_keys: list[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None] | None:
    """Return extra keys as events have them: without tags, which they have from vLLM 0.31 on."""
    if not any(extra_keys):
        return None
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)
    found: list[tuple[Any, ...] | None] | None = untag(extra_keys)
    return found
