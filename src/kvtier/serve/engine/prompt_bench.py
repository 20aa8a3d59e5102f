"""Runs single prompts on a model, and gives access to their KV as bytes: for benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.config import CHUNK_TOKENS
from kvtier.core.types import Slot
from kvtier.layout import KVGroup
from kvtier.serve.engine.models import LoadedModel, load_model
from kvtier.serve.engine.paged import Span
from kvtier.serve.engine.pool import KVPool
from kvtier.serve.engine.runner import ModelRunner

Float32s = npt.NDArray[np.float32]
Uint8s = npt.NDArray[np.uint8]


def load_for_bench(name: str, device: str, dtype: str) -> LoadedModel:
    """Load a model without waiting for the digest of its weights. Raises ``ConfigError``."""
    model = load_model(name, torch.device(device), dtype)
    if model.weights is not None:
        model.weights.stop()
    return model


class PromptBench:
    """A loaded model with a pool for one prompt, whose KV may be replaced.

    num_tokens: longest prompt with its answer.
    """

    def __init__(self, model: LoadedModel, group: KVGroup, num_tokens: int) -> None:
        self._group = group
        self._eos = frozenset(model.eos_token_ids)
        num_blocks = math.ceil(num_tokens / group.block_size)
        self._slots = [Slot(slot) for slot in range(num_blocks)]
        self._pool = KVPool(group, num_blocks, model.module.device, model.module.dtype)
        self._runner = ModelRunner(model.module, self._pool, CHUNK_TOKENS)

    def compute(self, prompt: Sequence[int], start: int, end: int) -> Float32s:
        """Compute tokens ``start .. end``, and return their logits: float32 [end - start, vocab].

        Of tokens before the loaded end, where start is 0, only the last one's are returned.
        """
        found = []
        for first in range(start, end, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, end)
            span, keep = Span(self._slots, first, last), last - first if start else 1
            found.append(self._runner.prefill_tail(prompt[first:last], span, keep))
        return np.asarray((torch.cat(found) if start else found[-1]).numpy())

    def answer(self, logits: Float32s, num_tokens: int, most: int) -> list[int]:
        """Return the greedy answer, up to its end token. logits: of the prompt's last token."""
        found = [int(logits.argmax())]
        while len(found) < most and found[-1] not in self._eos:
            span = Span(self._slots, num_tokens, num_tokens + 1)
            found.append(int(self._runner.decode([found[-1]], [span])[0].argmax()))
            num_tokens += 1
        return found

    def read(self, num_tokens: int) -> Uint8s:
        """Return the blocks of the first tokens, as stores have them: uint8 [num_blocks, bytes]."""
        rows = slice(0, num_tokens)
        num_blocks = num_tokens // self._group.block_size
        pieces = [
            self._pool.gather(layer, part, rows).reshape(num_blocks, -1).view(torch.uint8).cpu()
            for layer in range(self._group.num_layers)
            for part in range(len(self._group.parts))
        ]
        return np.asarray(torch.cat(pieces, dim=1).numpy())

    def write(self, blocks: Uint8s) -> None:
        """Put blocks back. blocks: as ``read`` returned them."""
        group, begin = self._group, 0
        num_tokens = len(blocks) * group.block_size
        for layer in range(group.num_layers):
            for at, part in enumerate(group.parts):
                end = begin + group.block_size * part.num_heads * part.dim * group.dtype.itemsize
                piece = torch.from_numpy(np.ascontiguousarray(blocks[:, begin:end]))
                values = piece.view(self._pool.dtype).view(num_tokens, part.num_heads, part.dim)
                self._pool.write(layer, at, slice(0, num_tokens), values)
                begin = end
