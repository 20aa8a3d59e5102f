"""Changes the logits of single requests before a token is chosen.

Requests without penalties, biases, a grammar or the like have no ``Shaper``, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.serve.engine.grammar import Matcher

NEVER = float("-inf")


class Shaper:
    """Penalties, biases, least length, grammar and ``min_p`` of one request.

    They are applied in this order, as in vLLM; temperature, top_k and top_p follow. Log
    probabilities are reported without them.

    Args:
        vocab_size: number of logits.
        prompt: its tokens count as repeated ones.
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias: as in
            ``SamplingParams``.
        banned_first: tokens that are not chosen among the first ``num_banned``.
        below_best: logits further below the largest one are left out: 0 or negative.
        matcher: of the request's grammar.

    Attributes:
        error: why no token can be chosen any more; "" while one can.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt: Sequence[int] = (),
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Sequence[tuple[int, float]] = (),
        banned_first: frozenset[int] = frozenset(),
        num_banned: int = 0,
        below_best: float | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.error = ""
        self._presence = presence_penalty
        self._frequency = frequency_penalty
        self._repetition = repetition_penalty
        self._below_best = below_best
        self._matcher = matcher
        self._num_banned = num_banned
        self._banned = torch.tensor(sorted(banned_first), dtype=torch.int64)
        self._biased = torch.tensor([token for token, _ in logit_bias], dtype=torch.int64)
        self._biases = torch.tensor([bias for _, bias in logit_bias], dtype=torch.float32)
        self._num_tokens = 0
        self._counts = self._is_seen = None
        if presence_penalty or frequency_penalty:
            self._counts = torch.zeros(vocab_size)
        if repetition_penalty != 1.0:
            self._is_seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._is_seen[torch.tensor(prompt, dtype=torch.int64)] = True

    def shape(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits: float32 [vocab_size], CPU. Never raises; see ``error``.

        logits: the same on any device; not changed.
        """
        made = logits.to("cpu", copy=True)
        if self._is_seen is not None:
            worse = torch.where(made > 0, made / self._repetition, made * self._repetition)
            made = torch.where(self._is_seen, worse, made)
        if self._counts is not None:
            made -= self._counts * self._frequency + (self._counts > 0) * self._presence
        if len(self._biased):
            made.index_add_(0, self._biased, self._biases)
        if self._num_tokens < self._num_banned:
            made[self._banned] = NEVER
        if self._matcher is not None:
            is_allowed = self._matcher.allowed(len(made))
            made[~torch.from_numpy(is_allowed)] = NEVER
            if not is_allowed.any():
                self.error = self._matcher.error or "its grammar allows no further token"
        if self._below_best is not None:
            made[made < made.max() + self._below_best] = NEVER
        return made

    def accept(self, token_id: int) -> None:
        """Take note of the chosen token."""
        self._num_tokens += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._is_seen is not None:
            self._is_seen[token_id] = True
        if self._matcher is not None:
            self._matcher.accept(token_id)
            self.error = self.error or self._matcher.error

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing further."""
        return self._matcher is not None and self._matcher.is_complete
