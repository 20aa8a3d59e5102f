"""Runs the model: one chunk of one prompt, or one token of many requests."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from kvtier.engine.batch import BatchKV
from kvtier.engine.config import EngineInfo
from kvtier.engine.paged import PagedKV, PromptKV, Span
from kvtier.engine.pool import KVPool
from kvtier.transfer import LayerGate
from kvtier.types import Slot

WARM_UP_TOKENS = 4096
"""Longest context of the warm-up."""


class ModelRunner:
    """Forwards over the paged pool.

    A prefill chunk always runs alone, so its KV depends only on its prompt and its place on the
    grid, never on other requests. Decoding batches requests; the batch size changes the rounding of
    logits.
    """

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._device = model.device
        self._keeps_all = "logits_to_keep" not in inspect.signature(model.forward).parameters

    @property
    def block_size(self) -> int:
        return self._pool.group.block_size

    def prefill(
        self, token_ids: Sequence[int], span: Span, gate: LayerGate | None = None
    ) -> torch.Tensor:
        """Compute the KV of a prompt's tokens ``span.start .. span.end``.

        token_ids: those tokens.
        gate: of the loads of earlier tokens. The call returns when these have ended, and raises the
        gate's ``DeviceError`` if they take too long.
        Returns the logits of the last token: float32 [vocab_size], CPU.
        """
        return self.prefill_tail(token_ids, span, 1, gate)[-1]

    @torch.inference_mode()
    def prefill_tail(
        self, token_ids: Sequence[int], span: Span, keep: int, gate: LayerGate | None = None
    ) -> torch.Tensor:
        """Do the same as ``prefill``, and return the logits of the last ``keep`` tokens."""
        positions = torch.arange(span.start, span.end)
        kv = PromptKV(self._pool, span, gate)
        logits = self._forward(torch.tensor(token_ids), positions, kv, keep)[-keep:]
        if gate is not None:
            gate.wait()  # first: waiting for the device has no time limit
        return logits.float().cpu()

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        """Compute one more token for each sequence.

        Returns logits: float32 [num_sequences, vocab_size], on the model's device.
        """
        order = sorted(range(len(spans)), key=lambda at: spans[at].end)
        is_sorted = order == list(range(len(spans)))
        ordered = [spans[at] for at in order]
        logits = self._forward(
            torch.tensor([token_ids[at] for at in order]),
            torch.tensor([span.start for span in ordered]),
            BatchKV(self._pool, ordered),
            keep=0,
        ).float()
        if is_sorted:
            return logits
        return logits.index_select(0, torch.tensor(order, device=logits.device).argsort())

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKV, keep: int
    ) -> torch.Tensor:
        """Return the logits of the last ``keep`` tokens of the row; 0 keeps all."""
        options = {} if self._keeps_all else {"logits_to_keep": keep}
        output = self._model(
            input_ids=token_ids[None].to(self._device),
            position_ids=positions[None].to(self._device),
            past_key_values=kv,
            use_cache=True,
            kv=kv,
            **options,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def warm_up(
    runner: ModelRunner, info: EngineInfo, observe: Callable[[int, int, float], None]
) -> None:
    """Run the model, and pass measured prefill times to ``observe``.

    It measures a whole chunk, a short one, and one after a long context. The pool is empty, so it
    may overwrite any blocks.

    observe: takes the tokens before, those computed, and seconds.
    """
    chunk = min(info.chunk_tokens, info.max_model_tokens - 1)
    far = min(WARM_UP_TOKENS, info.max_model_tokens - 1) - chunk
    slots = [Slot(slot) for slot in range((far + chunk) // info.block_size + 1)]
    runner.prefill([0] * chunk, Span(slots, 0, chunk))  # pays the one-time costs
    for first, num_tokens in ((0, chunk), (0, max(1, chunk // 4)), (far, chunk)):
        span = Span(slots, first, first + num_tokens)
        observe(first, num_tokens, _least_seconds(partial(runner.prefill, [0] * num_tokens, span)))
    runner.decode([0], [Span(slots, chunk, chunk + 1)])


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the least time of a few runs of ``work``.

    The first run counts only if it takes so long that another would take too long.
    """
    times: list[float] = []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 0.3) and sum(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
