"""Prefill cost, learned from the pieces that were computed.

A piece of n tokens that follows c others takes

    call_s  +  n * token_s  +  n * (c + n / 2) * pair_s

seconds: for every call, for every token, and for every token that another one attends to. What is
seen depends on what is reused: over a warm cache it is the short ends of long prompts only, and
their seconds per token are not those of a whole prompt. So the three are told apart. Pieces are
gathered in classes by n and by c (powers of four), each with a moving average, and the fit goes
through the classes: what was learnt of one kind of piece stays while others are seen, but counts
for less and less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.plan.average import Average, size_class

Floats = npt.NDArray[np.float64]

FITS = ((1,), (1, 2), (0, 1), (0, 1, 2))
"""Terms fitted (of call, token, pair), fewest first."""
GOOD_FIT = 0.01
"""Relative error below which more terms are not worth it."""
FEWEST_UNFITTED, MOST_UNFITTED = 8, 256
"""Observations after which ``recent`` is fitted again, where nobody else wants to know: as many as
there were by then, within these bounds."""
HALF_LIFE = 100
"""Observations of other classes after which one counts half; never less than a hundredth."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Estimated cost of prefill.

    token_s: per token, the calls' own time included. pair_s: per token and token before it.
    """

    token_s: float
    pair_s: float = 0.0

    def seconds(self, first: int, end: int) -> float:
        """To compute the tokens of a prompt from ``first`` up to ``end``."""
        pairs = (end * end - first * first) / 2
        return self.token_s * (end - first) + self.pair_s * pairs

    @property
    def doubles_at_tokens(self) -> float:
        """So many tokens into a prompt one takes twice as long as the first.

        0 where all take as long.
        """
        return max(1.0, self.token_s / self.pair_s) if self.pair_s > 0 else 0.0


class _Pieces:
    """The average piece of a class."""

    def __init__(self) -> None:
        self.num_tokens, self.num_before, self.seconds = Average(), Average(), Average()
        self.last_seen = 0

    def row(self) -> list[float]:
        """Return the factors of call_s, token_s and pair_s."""
        n, before = self.num_tokens.value, self.num_before.value
        return [1.0, n, n * (before + n / 2)]


class PrefillModel:
    """Collects observations; ``cost`` is the estimate they give."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], _Pieces] = {}
        self._cost: PrefillCost | None = None
        self._recent: PrefillCost | None = None
        self._num_seen = self._num_fitted = 0

    def observe(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """``num_tokens`` tokens were computed that follow ``num_before`` others."""
        if num_tokens <= 0 or seconds <= 0:
            return
        key = size_class(num_tokens), size_class(num_before)
        pieces = self._classes.setdefault(key, _Pieces())
        pieces.num_tokens.add(num_tokens)
        pieces.num_before.add(num_before)
        pieces.seconds.add(seconds)
        self._num_seen += 1
        pieces.last_seen = self._num_seen
        self._cost = None

    @property
    def num_seen(self) -> int:
        """Return the number of observed pieces."""
        return self._num_seen

    @property
    def cost(self) -> PrefillCost | None:
        """None while nothing was observed."""
        if self._cost is None and self._classes:
            self._cost = self._recent = self._fit()
            self._num_fitted = self._num_seen
        return self._cost

    @property
    def recent(self) -> PrefillCost | None:
        """``cost`` as it was when it was last asked for, and not long ago.

        A fit takes a hundred times as long as an observation.
        """
        due = min(max(self._num_fitted, FEWEST_UNFITTED), MOST_UNFITTED)
        if self._num_seen - self._num_fitted >= due:
            return self.cost
        return self._recent

    def _fit(self) -> PrefillCost:
        """Least squares of the relative errors, no term below zero."""
        seconds = np.array([pieces.seconds.value for pieces in self._classes.values()])
        rows = np.array([pieces.row() for pieces in self._classes.values()]) / seconds[:, None]
        ages = self._num_seen - np.array([pieces.last_seen for pieces in self._classes.values()])
        weights = np.sqrt(np.maximum(0.5 ** (ages / HALF_LIFE), 0.01))
        best, least = np.zeros(3), np.inf
        for terms in FITS:
            if len(terms) > len(seconds) or least < GOOD_FIT:
                break
            found = _solve(rows[:, terms], weights)
            errors = weights * (rows[:, terms] @ found - 1)
            error = float(np.sqrt(np.sum(errors**2) / np.sum(weights**2)))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(terms)] = found
        call_s, token_s, pair_s = best.tolist()
        longest = max(pieces.num_tokens.value for pieces in self._classes.values())
        return PrefillCost(token_s + call_s / longest, pair_s)


def _solve(rows: Floats, weights: Floats) -> Floats:
    """Coefficients with which every row gives 1, as nearly as can be."""
    rows = rows * weights[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    found, *_ = np.linalg.lstsq(rows / scale, weights, rcond=None)
    return np.asarray(found / scale)
