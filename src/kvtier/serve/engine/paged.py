"""Attention over the paged pool: no copy of the cache per request; shared prefixes exist once.

transformers passes each layer's new K and V to ``update`` of its cache object, then calls the
attention function with the result. This engine's cache object knows the sequences of one forward:
``PromptKV`` a chunk of one prompt, ``BatchKV`` (``batch.py``) one token of each of many sequences.

Models with a latent (MLA) expand it between ``update`` and attention. For them ``update`` returns
whole contexts, which attention receives expanded.

Attention is strict: an argument that it does not compute is an error, never ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from kvtier.cache.lease import Lease
from kvtier.cache.transfer import LayerGate
from kvtier.core.errors import ConfigError
from kvtier.core.types import Slot
from kvtier.layout import Attention
from kvtier.serve.engine.attention import AttentionParams, attention
from kvtier.serve.engine.pool import KVPool, Rows

ATTENTION = "kvtier_paged"

TOO_FAR = (
    "model: its attention reads more tokens than the window that it was seen to have, and the "
    "embedded engine does not keep them"
)

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a forward: new tokens ``start .. end`` of its context.

    slots: of blocks 0 .. ceil(end / block_size) of the sequence, or more.
    ring: slots of the window KV of its last blocks, bundle after bundle of layers. Block i is at i
    modulo the blocks of a bundle. Empty for a model without windows.
    lease: of the request, if the runner writes into other slots of it.
    """

    slots: Sequence[Slot]
    start: int
    end: int
    ring: Sequence[Slot] = ()
    lease: Lease | None = None


class ForwardKV(ABC):
    """The cache argument of one forward. Tokens of all its sequences are packed in one row."""

    @abstractmethod
    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K and V: [1, num_heads, num_tokens, dim], packed.

        It is called before any use of the layer's context.

        kwargs: arguments of the layer's attention, which ``attend`` gets, too.
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
        form: AttentionParams,
    ) -> torch.Tensor:
        """Attend with packed queries [1, num_heads, num_tokens, dim], each over its own context.

        layer: of the attention, which may use the KV of an earlier layer.
        key, value: results of that layer's ``update``, expanded if the model has a latent.
        Returns [1, num_tokens, num_heads, value dim].
        """

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before the forward's, of the longest sequence.

        Some models ask for it to know the positions of tokens, though they are given.
        """


class PagedKV(ForwardKV):
    """Cache argument whose contexts are in the pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._is_latent = pool.group.attention is Attention.LATENT
        self._updated: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _keep(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Note K and V of the next layer, as ``update`` returns them."""
        self._updated.append((key, value))
        return key, value

    def _source(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the layer whose K and V the attention of ``layer`` was given.

        It is an earlier one in models whose layers share KV (Gemma 3n).
        """
        if layer < len(self._updated) and _are(self._updated[layer], key, value):
            return layer
        for source, each in enumerate(self._updated):
            if _are(each, key, value):
                return source
        raise ConfigError(
            f"model: the attention of layer {layer} uses other K and V than the cache returned, "
            "which the embedded engine does not compute"
        )


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
        self._blocks = pool.blocks(span.slots, span.end)
        self._ring = ring_table(span.ring, pool)
        self._rows: dict[tuple[int | None, int], Rows] = {}
        self._masks: dict[int, torch.Tensor] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._pool.places[layer]
        rows = self._rows_from(place.bundle, self._span.start)
        for part, new in enumerate((key, value)):
            self._pool.write(place.layer, part, rows, new[0].transpose(0, 1))
        if self._gate is not None and place.bundle is None:
            self._gate.hold_compute(place.layer)
        return self._context(layer) if self._is_latent else self._keep(key, value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._span.start)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: AttentionParams,
    ) -> torch.Tensor:
        """Attend with query heads folded into the token axis, so K and V are never repeated."""
        window = form.window if form.window < self._span.end else 0
        if self._is_latent:
            keys, values = key, value
        else:
            keys, values = self._context(self._source(layer, key, value), window)
        num_heads, length = query.shape[1:3]
        groups = num_heads // keys.shape[1]
        folded = query.reshape(1, keys.shape[1], groups * length, query.shape[3])
        result = attention(folded, keys, values, self._causal(groups, query, window), form)
        return result.reshape(1, num_heads, length, values.shape[3]).transpose(1, 2).contiguous()

    def _first(self, window: int) -> int:
        """Return the first token that the first new token attends to."""
        return max(0, self._span.start + 1 - window) if window else 0

    def _context(self, layer: int, window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of tokens ``_first(window) .. end``, valid until the next call.

        [1, num_heads, num_tokens, dim]
        """
        place, end = self._pool.places[layer], self._span.end
        if window or place.bundle is not None:
            rows = self._rows_from(place.bundle, self._first(window))
            found = [self._pool.gather(place.layer, part, rows) for part in (0, 1)]
        else:
            found = [self._pool.read(place.layer, part, self._blocks, end) for part in (0, 1)]
        key, value = (each[None].transpose(1, 2) for each in found)
        return key, value

    def _rows_from(self, bundle: int | None, first: int) -> Rows:
        """Return the rows of tokens ``first .. end`` of the layers that are in ``bundle``."""
        if (bundle, first) not in self._rows:
            slots, end = self._span.slots, self._span.end
            self._rows[bundle, first] = (
                self._pool.rows(slots, first, end)
                if bundle is None
                else ring_rows(self._pool, self._ring[bundle], first, end)
            )
        return self._rows[bundle, first]

    def _causal(self, groups: int, like: torch.Tensor, window: int) -> torch.Tensor | None:
        """Return the mask to add to scores [groups * new tokens, end - first].

        None for a single new token.
        """
        length = self._span.end - self._span.start
        if length == 1:
            return None
        if window not in self._masks:
            first = self._first(window)
            shape = (length, self._span.end - first)
            ones = torch.ones(shape, dtype=torch.bool, device=like.device)
            own = self._span.start - first  # column of the first new token
            mask = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if window:
                mask.masked_fill_(ones.tril(own - window), float("-inf"))
            mask.masked_fill_(ones.triu_(own + 1), float("-inf"))
            self._masks[window] = mask.repeat(groups, 1)
        return self._masks[window]


def ring_table(ring: Sequence[Slot], pool: KVPool) -> npt.NDArray[np.int64]:
    """Return the slots of a ring: int64 [num_bundles, num_blocks]."""
    return np.array(ring, np.int64).reshape(max(1, pool.num_bundles), -1)


def ring_rows(pool: KVPool, bundle: npt.NDArray[np.int64], start: int, end: int) -> Rows:
    """Return the rows of tokens ``start .. end`` of a sequence of one bundle."""
    size = pool.group.block_size
    first, num_blocks = start // size, blocks_between(start, end, size)
    if num_blocks > len(bundle):
        raise ConfigError(TOO_FAR)
    slots = cast("Sequence[Slot]", bundle[np.arange(first, first + num_blocks) % len(bundle)])
    return pool.rows(slots, start - first * size, end - first * size)


def blocks_between(start: Tokens, end: Tokens, block_size: int) -> Tokens:
    """Return the number of blocks that tokens ``start .. end`` lie in."""
    return (end - 1) // block_size - start // block_size + 1


def _are(pair: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> bool:
    return pair[0] is key and pair[1] is value


HARMLESS = ("position_ids", "use_cache", "cache_position", "output_attentions")
"""Keywords that models pass on, and that no attention over given keys depends on."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv: ForwardKV,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers calls for each layer; ``kv`` knows the sequences.

    Raises ``ConfigError`` for what it does not compute.
    """
    given = {name: value for name, value in others.items() if name not in HARMLESS}
    odd = [name for name, value in given.items() if value is not None and value is not False]
    odd += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
    odd += ["is_causal=False"] * (is_causal is False)
    layer = getattr(module, "layer_idx", None)
    if odd or not isinstance(layer, int):
        what = ", ".join(sorted(odd)) or "no layer_idx"
        raise ConfigError(
            f"model: its attention ({type(module).__name__}) is given {what}, which the embedded "
            "engine does not compute"
        )
    form = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return kv.attend(layer, query, key, value, form), None


AttentionInterface.register(ATTENTION, paged_attention)
