"""Sampling: chooses the next tokens of all sequences of a step from their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn import functional

from kvtier.serve.engine.grammar import Grammar
from kvtier.serve.engine.shaping import Shaper

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

    max_tokens: 0 computes the prompt only.
    temperature: 0 and values below ``GREEDY_BELOW`` are greedy.
    top_k: 0 keeps all tokens.
    min_p: tokens less likely than this share of the likeliest one are left out; 0 keeps all.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once and
    for each time.
    repetition_penalty: divides positive logits of tokens of prompt and answer, multiplies negative
    ones.
    logit_bias: (token id, number) that are added to logits.
    min_tokens: no stop token is chosen before this number of tokens.
    grammar: what the answer has to be; it ends when it is complete.
    seed: equal seeds give equal choices from equal logits.
    num_logprobs: alternatives reported per token, beside its own log probability; None computes
    neither.
    prompt_logprobs: the same for tokens of the prompt. All of the prompt is computed then, and its
    KV is neither reused nor stored.
    keep_logits: keep the logits of every step.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    keep_logits: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def complaint(self) -> str:
        """Return what is wrong with these parameters, in one sentence; "" for nothing."""
        if self.max_tokens < 0:
            return f"max_tokens is {self.max_tokens}; it must be 0 (the prompt only) or more."
        if not 0.0 <= self.temperature <= 100.0:
            return f"temperature is {self.temperature}; it must lie between 0 and 100."
        if not 0.0 < self.top_p <= 1.0:
            return f"top_p is {self.top_p}; it must lie above 0 and at most at 1."
        if self.top_k < 0:
            return f"top_k is {self.top_k}; it must be 0 (all tokens) or more."
        if not 0.0 <= self.min_p <= 1.0:
            return f"min_p is {self.min_p}; it must lie between 0 and 1."
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                return f"{name} is {getattr(self, name)}; it must lie between -2 and 2."
        if not 0.0 < self.repetition_penalty <= 100.0:
            return (
                f"repetition_penalty is {self.repetition_penalty}; it must lie above 0 and at most "
                "at 100."
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            return (
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens, which is "
                f"{self.max_tokens}."
            )
        if self.min_tokens and self.grammar is not None:
            return "min_tokens is given with a grammar, which ends when it is complete; choose one."
        for name in ("num_logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= 20:
                return f"{name} is {number}; it must lie between 0 and 20."
        return ""

    def shaper(self, prompt: Sequence[int], ends: frozenset[int], vocab_size: int) -> Shaper | None:
        """Return what changes the logits before a token is chosen; None for nothing.

        ends: tokens that end the answer.
        """
        min_p = 0.0 if self.is_greedy else self.min_p
        is_penalised = self.presence_penalty or self.frequency_penalty
        is_repeating = self.repetition_penalty != 1.0
        if not (
            min_p
            or is_penalised
            or is_repeating
            or self.logit_bias
            or self.min_tokens
            or self.grammar is not None
        ):
            return None
        return Shaper(
            vocab_size,
            prompt,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            banned_first=ends if self.min_tokens else frozenset(),
            num_banned=self.min_tokens,
            below_best=self.temperature * math.log(min_p) if min_p else None,
            matcher=None if self.grammar is None else self.grammar.matcher(),
        )


class Sampler:
    """Random numbers of one request, and what changes its logits.

    The numbers are generated on the host from its seed only, so a seed gives the same results on
    every device and in any batch.
    """

    def __init__(self, params: SamplingParams, shaper: Shaper | None = None) -> None:
        self.params = params
        self.shaper = shaper
        self.is_greedy = params.is_greedy
        self.is_plain = self.is_greedy and shaper is None
        seed = None if params.seed is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._random = Random(seed)

    def draw(self) -> float:
        """Return the next number: 0 <= x < 1, one per sampled token."""
        return self._random.random()


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each sequence, or ``NO_TOKEN``.

    Each row is processed independently of the others.

    logits: float32 [num_sequences, vocab_size], on any device; not changed.
    """
    token_ids: list[int] = most_likely(logits).tolist()
    others = [at for at, sampler in enumerate(samplers) if not sampler.is_plain]
    if not others:
        return token_ids
    shaped: dict[int, torch.Tensor] = {}
    for at in others:
        shaper = samplers[at].shaper
        if shaper is not None:
            shaped[at] = shaper.shape(logits[at])
            token_ids[at] = int(shaped[at].argmax())
    sampled = [at for at in others if not samplers[at].is_greedy]
    size = max(1, TILE_LOGITS // logits.shape[1])
    for first in range(0, len(sampled), size):
        rows = sampled[first : first + size]
        tile = logits[torch.tensor(rows, device=logits.device)].cpu()
        for at, row in enumerate(rows):
            if row in shaped:
                tile[at] = shaped[row]
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
    asked = [sampler.params for sampler in samplers]
    scaled = logits / torch.tensor([[each.temperature] for each in asked])
    _keep_top_k(scaled, [each.top_k for each in asked])
    weights = scaled.softmax(-1)
    for row, each in zip(weights, asked, strict=True):
        if each.top_p < 1.0 and not row[0].isnan():
            _keep_nucleus(row, each.top_p)
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    drawn = torch.tensor([[sampler.draw()] for sampler in samplers], dtype=torch.float64) * total
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


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the same for many tokens at once.

    logits: float32 [num_tokens, vocab_size], of the tokens before.
    """
    logs = logits.log_softmax(-1)
    own: list[float] = logs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    if not num_top:
        return [(each, ()) for each in own]
    best = logs.topk(min(num_top, logs.shape[1]))
    ids, values = best.indices.tolist(), best.values.tolist()
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return list(zip(own, tops, strict=True))
