"""Runs the model: one chunk of one prompt, or one token of many requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvtier.engine.paged import PagedKV, Span
from kvtier.engine.pool import KVPool
from kvtier.transfer import LayerGate


class ModelRunner:
    """Forwards over the paged pool.

    A prefill chunk always runs alone, so its KV depends on its prompt and its place on the grid,
    never on what else is being served. Decoding batches requests; the size of a batch changes the
    rounding of its logits.
    """

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._device = model.device

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], span: Span, gate: LayerGate | None = None
    ) -> torch.Tensor:
        """Compute the KV of a prompt's tokens ``span.start .. span.end``.

        token_ids: those tokens. gate: of the loads of what lies before them; returns when these
        have ended, and raises the gate's ``DeviceError`` where they don't.
        Returns the logits after the last one: float32 [vocab_size], CPU.
        """
        return self._forward(list(token_ids), [span], gate=gate)[-1]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        """One more token for each sequence. Returns logits: float32 [num_sequences, vocab_size]."""
        return self._forward(list(token_ids), spans, keep=0)

    def _forward(
        self,
        token_ids: list[int],
        spans: Sequence[Span],
        keep: int = 1,
        gate: LayerGate | None = None,
    ) -> torch.Tensor:
        kv = PagedKV(self._pool, spans, gate)
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=positions[None].to(self._device),
            past_key_values=kv,
            use_cache=True,
            logits_to_keep=keep,
            kv=kv,
        )
        logits: torch.Tensor = output.logits[0]
        if gate is not None:
            gate.wait()  # before the device is waited for, which has no time limit
        return logits.float().cpu()
