"""Images and videos of a prompt: their features by chunk, and labels that name their content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from transformers.generation import utils
from transformers.utils.generic import ModelOutput

DIGEST_TOKENS = 8
"""Ids of four bytes that a digest fills. A chunk has at least as many tokens."""

FEATURES = "mm_encoder_outputs"
"""Argument of ``forward`` with what the encoders have made of images and videos. ``generate`` calls
the encoders first."""
TOKEN_TYPES = "mm_token_type_ids"
"""Argument with the kind of each token: 0 for text."""

UNDIVIDED = "images in a batch, with padding or with chunks of less than 8 tokens"
"""Reason why a prompt is passed through."""

_slice_features: Callable[[ModelOutput, torch.Tensor], ModelOutput] | None = getattr(
    utils, "_slice_mm_encoder_output", None
)
"""Features of some placeholder tokens, as ``generate(prefill_chunk_size=...)`` passes them."""


class Images:
    """Images and videos of one prompt, as ``generate`` passes them to ``forward``.

    Args:
        features: results of the encoders, by modality.
        ids: token ids [1, num_tokens].
        config: of the model; it has the ids of placeholders.
        positions: [..., 1, num_tokens], where they are not the default ones.
        types: kinds of tokens [1, num_tokens], or None.

    Raises:
        ValueError: the features can't be divided among chunks.
    """

    def __init__(
        self,
        features: Mapping[str, ModelOutput],
        ids: torch.Tensor,
        config: Any,
        positions: torch.Tensor | None,
        types: torch.Tensor | None,
    ) -> None:
        if _slice_features is None:
            raise ValueError("this transformers does not divide features among chunks")
        self._features = features
        self._positions, self._types = positions, types
        self._places: dict[str, torch.Tensor] = {}
        for modality, output in features.items():
            places = ids[0] == getattr(config, f"{modality}_token_id", -1)
            pooled = dict(output).get("pooler_output") if isinstance(output, ModelOutput) else None
            if pooled is None or sum(part[..., 0].numel() for part in pooled) != int(places.sum()):
                raise ValueError(f"the features of {modality}s are not one per placeholder")
            self._places[modality] = places

    def arguments(self, start: int, end: int) -> dict[str, Any]:
        """Return arguments of ``forward`` for tokens ``start .. end``, as ``generate`` does."""
        found: dict[str, Any] = {}
        if self._positions is not None:
            found["position_ids"] = self._positions[..., start:end]
        if self._types is not None:
            found[TOKEN_TYPES] = self._types[..., start:end].contiguous()
        features = {}
        for modality, places in self._places.items():
            before, num = int(places[:start].sum()), int(places[start:end].sum())
            if num:
                assert _slice_features is not None
                rows = torch.arange(before, before + num, device=places.device)
                features[modality] = _slice_features(self._features[modality], rows)
        return found | ({FEATURES: features} if features else {})

    def labelled(self, tokens: Sequence[int], chunk_tokens: int) -> list[int]:
        """Return the tokens; where a chunk has more than text, a digest of it all instead."""
        labelled = list(tokens)
        for start in range(0, len(tokens) // chunk_tokens * chunk_tokens, chunk_tokens):
            end = start + chunk_tokens
            found = self.arguments(start, end)
            if self._is_text(found, start, end):
                continue
            digest = blake2b(np.array(tokens[start:end], np.int64).tobytes(), digest_size=32)
            _add(digest, found)
            words = np.frombuffer(digest.digest(), np.uint32)
            labelled[start:end] = np.resize(words, chunk_tokens).tolist()
        return labelled

    @staticmethod
    def _is_text(found: Mapping[str, Any], start: int, end: int) -> bool:
        if FEATURES in found or (TOKEN_TYPES in found and found[TOKEN_TYPES].any()):
            return False
        positions = found.get("position_ids")
        if positions is None:
            return True
        return bool((positions == torch.arange(start, end, device=positions.device)).all())


def _add(digest: blake2b, value: object) -> None:
    """Add the content of nested tensors to a digest."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(f"{key}:".encode())
            _add(digest, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())
