"""The KV of a model's cache layers: shapes by a probe, and copies between a cache and blocks.

A block is one chunk of a prompt: K and V of its tokens, of every layer. Only transformers reads it,
so its content is a row of pieces, one per layer and tensor, each as transformers arranges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvtier.errors import CacheError
from kvtier.layout import Attention, DType, KVGroup, Part

ALIGN_BYTES = 64
"""Pieces begin at multiples of this, so that each can be viewed as its dtype."""
PAGE_BYTES = 4096
"""Blocks end at multiples of this, so that disks can read them directly."""


class UnsupportedModelError(CacheError):
    """A model whose KV cannot be reused here. Its message completes "because"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """K or V of one layer in a block: [num_heads, chunk_tokens, dim].

    offset, num_bytes: in the block.
    """

    layer: int
    name: str
    num_heads: int
    dim: int
    dtype: torch.dtype
    offset: int
    num_bytes: int


class KVLayers:
    """The cache layers of a model, and the place of each in a block.

    Args:
        model: the model. It computes two tokens here, which tells the shapes.
        chunk_tokens: tokens per block.

    Raises:
        UnsupportedModelError: the model has layers whose KV cannot be restored.
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._config = model.config
        self.pieces: list[Piece] = []
        self._devices: list[torch.device] = []
        num_bytes = 0
        for at, layer in enumerate(self._probe(model).layers):
            if type(layer) is not DynamicLayer:
                raise UnsupportedModelError(f"layer {at} keeps its KV in a {type(layer).__name__}")
            if not layer.is_initialized:
                raise UnsupportedModelError(f"layer {at} has no KV of its own")
            assert layer.keys is not None
            assert layer.values is not None
            self._devices.append(layer.keys.device)
            for name, tensor in (("keys", layer.keys), ("values", layer.values)):
                if tensor.shape[:1] != (1,) or tensor.shape[2:3] != (2,) or tensor.ndim != 4:
                    raise UnsupportedModelError(
                        f"layer {at} has {name} of shape {tuple(tensor.shape)}"
                    )
                heads, dim = int(tensor.shape[1]), int(tensor.shape[3])
                size = heads * chunk_tokens * dim * tensor.dtype.itemsize
                piece = Piece(at, name, heads, dim, tensor.dtype, num_bytes, size)
                self.pieces.append(piece)
                num_bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        content = Part("chunk", 1, num_bytes, per_token=False)
        self.group = KVGroup(Attention.FULL, 1, (content,), DType.UINT8, chunk_tokens)

    def _probe(self, model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not cache.layers:
            raise UnsupportedModelError("it uses no DynamicCache")
        return cache

    @property
    def fingerprint(self) -> str:
        """The content of a block: equal if blocks can be exchanged."""
        return repr(self.pieces)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache, as ``generate`` makes one."""
        return DynamicCache(config=self._config)

    def fits(self, cache: DynamicCache) -> bool:
        """Whether ``cache`` is empty, and has layers of the kinds that were probed."""
        if cache.offloading:
            return False
        if not cache.layers:
            return cache.layer_class_to_replicate is DynamicLayer
        return len(cache.layers) == len(self._devices) and all(
            type(layer) is DynamicLayer and layer.get_seq_length() == 0 for layer in cache.layers
        )

    def save(self, cache: DynamicCache, first_token: int, block: torch.Tensor) -> None:
        """Copy the KV of a chunk that begins with ``first_token`` to ``block``: uint8."""
        tokens = slice(first_token, first_token + self.chunk_tokens)
        for piece in self.pieces:
            layer = cache.layers[piece.layer]
            self._view(piece, block).copy_(getattr(layer, piece.name)[0, :, tokens])

    def restore(self, cache: DynamicCache, blocks: Sequence[torch.Tensor]) -> None:
        """Fill an empty cache with the KV of consecutive chunks, from the first on."""
        self._make_layers(cache)
        for piece in self.pieces:
            device = self._devices[piece.layer]
            parts = [self._view(piece, block).to(device, non_blocking=True) for block in blocks]
            self._put(cache, piece, torch.cat(parts, dim=1)[None])

    def join(self, cache: DynamicCache, rows: Sequence[DynamicCache], num_tokens: int) -> None:
        """Fill an empty cache with one row per cache of ``rows``, padded on the left by zeros.

        num_tokens: length of the rows, with padding. Padding is masked wherever it is used.
        """
        self._make_layers(cache)
        for piece in self.pieces:
            parts = [getattr(row.layers[piece.layer], piece.name)[0] for row in rows]
            shape = (len(rows), piece.num_heads, num_tokens, piece.dim)
            joined = torch.zeros(shape, dtype=piece.dtype, device=self._devices[piece.layer])
            for at, part in enumerate(parts):
                joined[at, :, num_tokens - part.shape[1] :] = part
            self._put(cache, piece, joined)

    def _make_layers(self, cache: DynamicCache) -> None:
        while len(cache.layers) < len(self._devices):
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]

    @staticmethod
    def _put(cache: DynamicCache, piece: Piece, tensor: torch.Tensor) -> None:
        """Set K or V of an empty layer. Its own ``update`` would copy the tensor once more."""
        layer = cache.layers[piece.layer]
        assert isinstance(layer, DynamicLayer)
        if not layer.is_initialized:
            layer.lazy_initialization(tensor, tensor)
        setattr(layer, piece.name, tensor)

    def _view(self, piece: Piece, block: torch.Tensor) -> torch.Tensor:
        """Return a piece of a block: [num_heads, chunk_tokens, dim]."""
        flat = block[piece.offset : piece.offset + piece.num_bytes].view(piece.dtype)
        return flat.view(piece.num_heads, self.chunk_tokens, piece.dim)
