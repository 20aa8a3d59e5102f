"""Attention over the paged pool: no copy of the cache per request; shared prefixes exist once.

transformers passes each layer's new K and V to ``update`` of its cache object, then calls the
attention function with the result. This engine's cache object knows the sequences of one forward:
``PromptKV`` a chunk of one prompt, ``BatchKV`` (``batch.py``) one token of each of many sequences.

Models with a latent (MLA) expand it between ``update`` and attention. For them ``update`` returns
whole contexts, which attention receives expanded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

    slots: of blocks 0 .. ceil(end / block_size) of the sequence, or more.
    """

    slots: Sequence[Slot]
    start: int
    end: int


class PagedKV(ABC):
    """The cache argument of one forward. Tokens of all its sequences are packed in one row."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._is_latent = pool.group.attention is Attention.LATENT

    @abstractmethod
    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K and V: [1, num_heads, num_tokens, dim], packed.

        It is called before any use of the layer's context.

        Returns the contexts of all sequences for latent attention, packed in the same form;
        otherwise its arguments, because attention reads the pool itself.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend with packed queries [1, num_heads, num_tokens, dim], each over its own context.

        key, value: results of ``update``, expanded if the model has a latent.
        Returns [1, num_tokens, num_heads, value dim].
        """


class PromptKV(PagedKV):
    """A chunk of one prompt.

    If its slots are contiguous the context is a view of the pool; otherwise one layer's context is
    gathered block by block for the call. Both have the same shape and strides, so the result does
    not depend on the location of blocks.

    gate: passed before the context of a layer is used, while some of it may still be in flight.
    """

    def __init__(self, pool: KVPool, span: Span, gate: LayerGate | None = None) -> None:
        super().__init__(pool)
        self._gate = gate
        self._span = span
        self._rows = pool.rows(span.slots, span.start, span.end)
        self._blocks = pool.blocks(span.slots, span.end)
        self._mask: torch.Tensor | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for part, new in enumerate((key, value)):
            self._pool.write(layer, part, self._rows, new[0].transpose(0, 1))
        if self._gate is not None:
            self._gate.hold_compute(layer)
        return self._context(layer) if self._is_latent else (key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend with query heads folded into the token axis, so K and V are never repeated."""
        keys, values = (key, value) if self._is_latent else self._context(layer)
        num_heads, length = query.shape[1:3]
        groups = num_heads // keys.shape[1]
        folded = query.reshape(1, keys.shape[1], groups * length, query.shape[3])
        result = scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._causal(groups, query), scale=scaling
        )
        return result.reshape(1, num_heads, length, values.shape[3]).transpose(1, 2).contiguous()

    def _context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the context: [1, num_heads, end, dim], valid until the next call."""
        key, value = (
            self._pool.read(layer, part, self._blocks, self._span.end)[None].transpose(1, 2)
            for part in (0, 1)
        )
        return key, value

    def _causal(self, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the mask to add to scores [groups * new tokens, end].

        None for a single new token.
        """
        length = self._span.end - self._span.start
        if length > 1 and self._mask is None:
            shape = (length, self._span.end)
            unseen = torch.ones(shape, dtype=torch.bool, device=like.device)
            mask = torch.zeros(shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(unseen.triu_(self._span.start + 1), float("-inf"))
            self._mask = mask.repeat(groups, 1)
        return self._mask


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
    """Attention function that transformers calls for each layer; ``kv`` knows the sequences."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return kv.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, paged_attention)
