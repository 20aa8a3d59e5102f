"""Prefill cost, learned from the pieces that were computed.

A piece of n tokens that follows c others takes

    call_s  +  n * token_s  +  n * (c + n / 2) * pair_s

seconds: per call, per token, and per token that another one attends to. The observed pieces depend
on what is reused: with a warm cache they are the short ends of long prompts, whose seconds per
token differ from those of a whole prompt. Therefore the three terms are fitted separately. Pieces
are grouped in classes by n and by c (powers of four), each with a moving average, and the fit is
over the classes. So a class is remembered, with decreasing weight, while other classes are
observed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.plan.average import Average, Judgement, Outliers, size_class

Floats = npt.NDArray[np.float64]

FITS = ((1,), (1, 2), (0, 1), (0, 1, 2))
"""Sets of fitted terms (0: call, 1: token, 2: pair), fewest first."""
GOOD_FIT = 0.01
"""Relative error below which further terms are not tried."""
FEWEST_UNFITTED, MAX_UNFITTED = 8, 256
"""Bounds of the number of observations after which ``recent`` fits again: as many as there were at
the last fit."""
DEVIATION = 4.0
"""Factor by which a piece's seconds per token may differ from those of its class, within which the
number of tokens differs by as much. A piece that differs by more is an outlier."""
HALF_LIFE = 100
"""Observations of other classes after which a class has half its weight; never below a
hundredth."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Estimated cost of prefill.

    token_s: seconds per token, including the calls' fixed time.
    pair_s: seconds per token and token before it.
    """

    token_s: float
    pair_s: float = 0.0

    def seconds(self, first: int, end: int) -> float:
        """Return the seconds to compute the tokens of a prompt from ``first`` up to ``end``."""
        pairs = (end * end - first * first) / 2
        return self.token_s * (end - first) + self.pair_s * pairs

    @property
    def doubles_at_tokens(self) -> float:
        """Position in a prompt at which a token takes twice as long as the first; 0 if never."""
        return max(1.0, self.token_s / self.pair_s) if self.pair_s > 0 else 0.0


class _Pieces:
    """Average piece of a class."""

    def __init__(self) -> None:
        self._outliers = Outliers(DEVIATION)
        self.last_seen = 0
        self._begin()

    def _begin(self) -> None:
        self.num_tokens, self.num_before, self.seconds = Average(), Average(), Average()

    def add(self, num_before: int, num_tokens: int, seconds: float) -> None:
        if self.seconds.num_seen:
            expected_s = self.seconds.value * num_tokens / self.num_tokens.value
            judgement = self._outliers.judge(seconds / expected_s)
            # The first piece often has one-time costs: a second one that is faster replaces it.
            is_late_start = self.seconds.num_seen == 1 and seconds < expected_s
            if judgement is Judgement.HELD and not is_late_start:
                return
            if judgement is not Judgement.USUAL:
                self._begin()
        self.num_tokens.add(num_tokens)
        self.num_before.add(num_before)
        self.seconds.add(seconds)

    def row(self) -> list[float]:
        """Return the factors of call_s, token_s and pair_s."""
        n, before = self.num_tokens.value, self.num_before.value
        return [1.0, n, n * (before + n / 2)]


class PrefillModel:
    """Collects observations; ``cost`` is the resulting estimate."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], _Pieces] = {}
        self._cost: PrefillCost | None = None
        self._recent: PrefillCost | None = None
        self._num_seen = self._num_fitted = 0

    def observe(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Record that ``num_tokens`` tokens after ``num_before`` others took ``seconds``."""
        if num_tokens <= 0 or seconds <= 0:
            return
        key = size_class(num_tokens), size_class(num_before)
        pieces = self._classes.setdefault(key, _Pieces())
        pieces.add(num_before, num_tokens, seconds)
        self._num_seen += 1
        pieces.last_seen = self._num_seen
        self._cost = None

    @property
    def num_seen(self) -> int:
        """Number of observed pieces."""
        return self._num_seen

    @property
    def cost(self) -> PrefillCost | None:
        """Current estimate; None without observations."""
        if self._cost is None and self._classes:
            self._cost = self._recent = self._fit()
            self._num_fitted = self._num_seen
        return self._cost

    @property
    def recent(self) -> PrefillCost | None:
        """An estimate that may be some observations old.

        A fit takes a hundred times as long as an observation.
        """
        due = min(max(self._num_fitted, FEWEST_UNFITTED), MAX_UNFITTED)
        if self._num_seen - self._num_fitted >= due:
            return self.cost
        return self._recent

    def _fit(self) -> PrefillCost:
        """Fit by least squares of the relative errors, with no term below zero."""
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
    """Return the coefficients with which every row gives 1, as nearly as possible."""
    rows = rows * weights[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    found, *_ = np.linalg.lstsq(rows / scale, weights, rcond=None)
    return np.asarray(found / scale)
