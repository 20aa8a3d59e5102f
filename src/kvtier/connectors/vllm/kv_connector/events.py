"""KV events of the tiers, in the words of vLLM's own events of its device memory.

A cache of keyed blocks knows hashes only. Routers that compute hashes of their own need the tokens,
too, which are at hand while a request is stored or looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from kvtier.connectors.vllm.shared.descriptions import (
    Description,
    event_extra_keys,
    kind_of_group,
    published_hash,
)
from kvtier.connectors.vllm.shared.prompt import GROUP_BYTES, group_of, kind_of

if TYPE_CHECKING:
    from kvtier.cache.block_cache import Change
    from kvtier.connectors.vllm.shared.names import EngineFacts

MAX_KNOWN = 1 << 16
"""Blocks whose descriptions are remembered: 35 MB at 16 tokens per block."""


class TierEvents:
    """Describes blocks while their request is at hand, and turns changes of tiers into KV events.

    A block without a description is published by its hash alone. An earlier process has stored it,
    and no request has named it yet.

    Args:
        facts: Sizes of the engine's blocks and hashes.
        specs: vLLM's description of each KV group.
    """

    def __init__(self, facts: EngineFacts, specs: Sequence[object]) -> None:
        self._tokens_per_hash = facts.tokens_per_hash
        self._block_tokens = [
            group.tokens_per_page * facts.pages_per_block for group in facts.groups
        ]
        self._groups = [
            _if_known(BlockStored, group_idx=at, kv_cache_spec_kind=kind_of_group(spec))
            for at, spec in enumerate(specs)
        ]
        self._known: OrderedDict[bytes, Description] = OrderedDict()

    def describe(self, request: Any, key: bytes, end: int) -> None:
        """Remember what a block is. end: number of the request's tokens up to the block's end."""
        if key in self._known:
            self._known.move_to_end(key)
            return
        begin = end - self._block_tokens[group_of(key)]
        self._known[key] = Description.of(request, self._tokens_per_hash, begin, end)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, change: Change) -> Iterator[KVCacheEvent]:
        """Yield the events of blocks that entered or left a tier."""
        medium, locality = kind_of(change.tier)
        place = {"medium": medium, **_if_known(BlockStored, locality=locality)}
        unknown = [published_hash(k[:-GROUP_BYTES]) for k in change.keys if k not in self._known]
        keys = [key for key in change.keys if key in self._known]
        known = [self._known[key] for key in keys]
        if change.is_removed:
            removed = [one for block in known for one in block.hashes] + unknown
            yield BlockRemoved(removed, medium, **_if_known(BlockRemoved, locality=locality))
            return
        first = 0
        for end in range(1, len(known) + 1):
            is_next = end < len(known) and group_of(keys[end]) == group_of(keys[end - 1])
            if not is_next or known[end].parent != known[end - 1].hashes[-1]:
                yield self._stored(known[first:end], self._groups[group_of(keys[first])] | place)
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
            **_if_known(BlockStored, extra_keys=event_extra_keys(extra_keys)),
        )


def _if_known(event: type[KVCacheEvent], **fields: object) -> dict[str, Any]:
    """Return those of some fields that this version's event has."""
    known = event.__struct_fields__
    return {name: value for name, value in fields.items() if name in known}
