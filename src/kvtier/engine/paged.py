"""Attention over the paged pool: no copy of the cache per request, shared prefixes stored once.

transformers gives each layer's new K and V to ``PagedKV.update`` and then calls the attention
function with whatever that returns. Tokens of several sequences are packed in one row; each
sequence attends to its own blocks of the pool. Where these are neighbours the context is a view of
the pool, otherwise one layer's context is gathered block by block for the time of the call. Both
have the same shape and strides, so the result does not depend on where blocks lie.

Models that keep a latent (MLA) expand it between ``update`` and attention. They get the packed
contexts back from ``update`` and attention cuts them apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvtier.engine.pool import KVPool
from kvtier.layout import Attention
from kvtier.transfer import LayerGate
from kvtier.types import Slot

ATTENTION = "kvtier_paged"


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a forward: new tokens ``start .. end`` of its context.

    slots: of blocks 0 .. ceil(end / block_size) of the sequence.
    """

    slots: Sequence[Slot]
    start: int
    end: int


class PagedKV:
    """The cache argument of one forward: writes new K and V to the pool, finds each context.

    gate: passed before the context of a layer is used, where some of it may still be on its way.
    """

    def __init__(self, pool: KVPool, spans: Sequence[Span], gate: LayerGate | None = None) -> None:
        self._pool = pool
        self._gate = gate
        self.spans = spans
        self.is_latent = pool.group.attention is Attention.LATENT
        self._rows = [pool.rows(span.slots, span.start, span.end) for span in spans]
        self._contexts = [pool.blocks(span.slots, span.end) for span in spans]
        self._masks: dict[int, torch.Tensor] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K and V: [1, num_heads, num_tokens, dim], packed. Comes before any use of the
        layer's context.

        Returns for latent attention the packed contexts of all sequences, in the same form;
        otherwise what it was given, for attention reads the pool itself.
        """
        for part, new in enumerate((key, value)):
            packed = new[0].transpose(0, 1)
            at = 0
            for span, rows in zip(self.spans, self._rows, strict=True):
                length = span.end - span.start
                self._pool.write(layer, part, rows, packed[at : at + length])
                at += length
        if self._gate is not None:
            self._gate.hold_compute(layer)
        if not self.is_latent:
            return key, value
        if len(self.spans) == 1:
            return self.context(layer, 0)
        # A context may be overwritten by the next one that is read: keep each.
        contexts = [map(torch.clone, self.context(layer, at)) for at in range(len(self.spans))]
        keys, values = zip(*contexts, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def context(self, layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence's whole context: [1, num_heads, end, dim], until the next call."""
        length = self.spans[sequence].end
        key, value = (
            self._pool.read(layer, part, self._contexts[sequence], length)[None].transpose(1, 2)
            for part in (0, 1)
        )
        return key, value

    def mask(self, sequence: int, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Causal mask [groups * new tokens, end] to add to scores; None for a single new token."""
        span = self.spans[sequence]
        length = span.end - span.start
        if length == 1:
            return None
        if sequence not in self._masks:
            unseen = torch.ones(length, span.end, dtype=torch.bool, device=like.device)
            mask = torch.zeros(length, span.end, dtype=like.dtype, device=like.device)
            mask.masked_fill_(unseen.triu_(span.start + 1), float("-inf"))
            self._masks[sequence] = mask.repeat(groups, 1)
        return self._masks[sequence]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    kv: PagedKV,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of packed queries [1, num_heads, num_tokens, dim], each over its own context.

    Query heads that share a KV head are folded into the token axis, so K and V are never repeated.
    Returns [1, num_tokens, num_heads, value dim], as transformers expects it.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    outputs: list[torch.Tensor] = []
    at = context_at = 0
    for sequence, span in enumerate(kv.spans):
        length = span.end - span.start
        queries = query[:, :, at : at + length]
        if kv.is_latent:
            keys = key[:, :, context_at : context_at + span.end]
            values = value[:, :, context_at : context_at + span.end]
        else:
            keys, values = kv.context(layer, sequence)
        groups = queries.shape[1] // keys.shape[1]
        folded = queries.reshape(1, keys.shape[1], groups * length, queries.shape[3])
        result = scaled_dot_product_attention(
            folded, keys, values, attn_mask=kv.mask(sequence, groups, query), scale=scaling
        )
        outputs.append(result.reshape(1, queries.shape[1], length, values.shape[3]))
        at += length
        context_at += span.end
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, paged_attention)
