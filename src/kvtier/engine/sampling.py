"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow in float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    temperature: 0 is greedy, and so is what lies below ``GREEDY_BELOW``. top_k: 0 keeps all tokens.
    seed: equal seeds give equal choices from equal logits. num_logprobs: alternatives reported per
    token. keep_logits: keep every step's.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = 0
    keep_logits: bool = False

    def complaint(self) -> str:
        """What is wrong with these parameters, in one sentence; "" when nothing is."""
        if self.max_tokens < 1:
            return f"max_tokens is {self.max_tokens}; ask for at least one token."
        if not 0.0 <= self.temperature <= 100.0:
            return f"temperature is {self.temperature}; it must lie between 0 and 100."
        if not 0.0 < self.top_p <= 1.0:
            return f"top_p is {self.top_p}; it must lie above 0 and at most at 1."
        if self.top_k < 0:
            return f"top_k is {self.top_k}; it must be 0 (all tokens) or more."
        if not 0 <= self.num_logprobs <= 20:
            return f"num_logprobs is {self.num_logprobs}; it must lie between 0 and 20."
        return ""


class Sampler:
    """Chooses the tokens of one request; drawn on the CPU, so a seed means the same everywhere."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        else:
            self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id. logits: float32 [vocab_size], on the CPU."""
        params = self._params
        if params.temperature < GREEDY_BELOW:
            return int(logits.argmax())
        scaled = logits / params.temperature
        if 0 < params.top_k < scaled.numel():
            smallest_kept = scaled.topk(params.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < smallest_kept, float("-inf"))
        probabilities = scaled.softmax(-1)
        if params.top_p < 1.0:
            ordered, order = probabilities.sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= params.top_p
            outside[0] = False  # in float32 a very small top_p is 0, and nothing would be left
            probabilities[order[outside]] = 0.0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def logprobs(
    logits: torch.Tensor, token_id: int, num_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log probability of ``token_id``, and the ``num_top`` best tokens with theirs, best first.

    logits: float32 [vocab_size], untouched by temperature.
    """
    logs = logits.log_softmax(-1)
    if not num_top:
        return float(logs[token_id]), ()
    best = logs.topk(min(num_top, logs.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return float(logs[token_id]), tuple(pairs)
