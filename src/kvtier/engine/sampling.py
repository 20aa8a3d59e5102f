"""Sampling: chooses the next tokens of all sequences of a step from their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn import functional

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow in float32."""

TILE_LOGITS = 1 << 18
"""Logits that are processed together, so that they stay in a processor's cache."""

STRETCH = 128
"""Group of logits whose maxima are searched first; divides most vocabulary sizes."""

FEW_LOGITS = 1 << 14
"""Below this size one search is faster than four calls."""

NO_TOKEN = -1
"""Result of sampling from logits that are not numbers."""

LEADING_SHIFT = 20
"""Keeps the exponent of a float32 and three bits of its fraction."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, and its stop conditions.

    temperature: 0 and values below ``GREEDY_BELOW`` are greedy.
    top_k: 0 keeps all tokens.
    seed: equal seeds give equal choices from equal logits.
    num_logprobs: alternatives reported per token, beside its own log probability; None computes
    neither.
    keep_logits: keep the logits of every step.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    keep_logits: bool = False

    def complaint(self) -> str:
        """Return what is wrong with these parameters, in one sentence; "" for nothing."""
        if self.max_tokens < 1:
            return f"max_tokens is {self.max_tokens}; ask for at least one token."
        if not 0.0 <= self.temperature <= 100.0:
            return f"temperature is {self.temperature}; it must lie between 0 and 100."
        if not 0.0 < self.top_p <= 1.0:
            return f"top_p is {self.top_p}; it must lie above 0 and at most at 1."
        if self.top_k < 0:
            return f"top_k is {self.top_k}; it must be 0 (all tokens) or more."
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= 20:
            return f"num_logprobs is {self.num_logprobs}; it must lie between 0 and 20."
        return ""


class Sampler:
    """Random numbers of one request.

    They are generated on the host from its seed only, so a seed gives the same results on every
    device and in any batch.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        seed = None if params.seed is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._random = Random(seed)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    def draw(self) -> float:
        """Return the next number: 0 <= x < 1, one per sampled token."""
        return self._random.random()


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each sequence, or ``NO_TOKEN``.

    Each row is processed independently of the others.

    logits: float32 [num_sequences, vocab_size], on any device.
    """
    token_ids: list[int] = most_likely(logits).tolist()
    sampled = [at for at, each in enumerate(samplers) if not each.is_greedy]
    size = max(1, TILE_LOGITS // logits.shape[1])
    for first in range(0, len(sampled), size):
        rows = sampled[first : first + size]
        tile = logits[torch.tensor(rows, device=logits.device)].cpu()
        for row, token_id in zip(rows, _sample(tile, [samplers[r] for r in rows]), strict=True):
            token_ids[row] = token_id
    return token_ids


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return ``logits.argmax(-1)``: int64 [num_rows].

    On CPUs argmax is scalar while max is vectorised. Therefore only the stretch with the maximum is
    searched.

    logits: [num_rows, vocab_size].
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % STRETCH or logits.numel() < FEW_LOGITS:
        return logits.argmax(-1)
    stretches = logits.reshape(num_rows, -1, STRETCH)
    first = stretches.amax(-1).argmax(-1)
    found = stretches[torch.arange(num_rows, device=logits.device), first]
    return first * STRETCH + found.argmax(-1)


def _sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return one token for each row.

    It is the first one at which the cumulated probability of the kept tokens exceeds the drawn
    share of their total.
    """
    asked = [each.params for each in samplers]
    scaled = logits / torch.tensor([[each.temperature] for each in asked])
    _keep_top_k(scaled, [each.top_k for each in asked])
    weights = scaled.softmax(-1)
    for row, each in zip(weights, asked, strict=True):
        if each.top_p < 1.0 and not row[0].isnan():
            _keep_nucleus(row, each.top_p)
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    drawn = torch.tensor([[each.draw()] for each in samplers], dtype=torch.float64) * total
    drawn = drawn.minimum(total.nextafter(torch.zeros_like(total)))  # a product may round up
    chosen = torch.searchsorted(sums, drawn, right=True)
    token_ids: list[int] = torch.where(total > 0, chosen, NO_TOKEN)[:, 0].tolist()
    return token_ids


def _keep_top_k(scaled: torch.Tensor, top_k: Sequence[int]) -> None:
    """Set logits below each row's ``top_k`` largest to minus infinity."""
    vocab_size = scaled.shape[1]
    cut = [row for row, count in enumerate(top_k) if 0 < count < vocab_size]
    if not cut:
        return
    counts = torch.tensor([[top_k[row]] for row in cut])
    best = scaled[cut].topk(int(counts.max())).values
    lowest = torch.full((len(scaled), 1), float("-inf"))
    lowest[cut] = best.gather(1, counts - 1)
    scaled.masked_fill_(scaled < lowest, float("-inf"))


def _keep_nucleus(probabilities: torch.Tensor, share: float) -> None:
    """Set all to 0 but the fewest tokens whose probabilities add up to ``share``.

    Of equal ones the first are kept. Only a few are sorted: the bits of a non-negative float have
    its order, so the mass of each of their leading values tells where the nucleus ends.

    probabilities: float32 [vocab_size], changed in place.
    """
    leading = probabilities.view(torch.int32) >> LEADING_SHIFT
    mass = torch.bincount(leading, probabilities.double())
    at_least = mass.flip(0).cumsum(0).flip(0)
    last = max(0, int((at_least >= share).sum()) - 1)  # rounding may leave less than the share
    border = probabilities[leading == last].sort(descending=True).values
    sums = border.double().cumsum(0) + (at_least[last] - mass[last])
    num_kept = min(int((sums < share).sum()) + 1, len(border))
    smallest = float(border[num_kept - 1])
    num_equal = num_kept - int((border > smallest).sum())
    equal = (probabilities == smallest).nonzero()[:num_equal, 0]
    functional.threshold(probabilities, smallest, 0.0, inplace=True)
    probabilities[equal] = smallest


def logprobs(
    logits: torch.Tensor, token_id: int, num_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log probability of ``token_id``, and the ``num_top`` best tokens with theirs.

    The best come first. logits: float32 [vocab_size], before temperature.
    """
    logs = logits.log_softmax(-1)
    if not num_top:
        return float(logs[token_id]), ()
    best = logs.topk(min(num_top, logs.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return float(logs[token_id]), tuple(pairs)
