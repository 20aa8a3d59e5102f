"""Moving averages by size."""

from __future__ import annotations

from enum import Enum, auto

SMOOTHING = 0.2
"""Weight of the newest observation: an old regime is forgotten after about ten. The first few count
equally, because the very first one often includes one-time costs."""


def size_class(size: int) -> int:
    """Return the class of a size, by powers of four: 0 for up to 3, 10 for 1 to 4 Mi."""
    return (max(size, 1).bit_length() - 1) // 2


FEW = 5
"""Fewer observations than this are unreliable: each of them moves the average by more than
``SMOOTHING``."""


class Average:
    """Mean of the first observations, then exponential moving average."""

    __slots__ = ("num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0

    def add(self, new: float) -> None:
        self.num_seen += 1
        self.value += max(SMOOTHING, 1 / self.num_seen) * (new - self.value)


class Judgement(Enum):
    """Use of an observation."""

    USUAL = auto()
    HELD = auto()
    """It differs too much to be believed alone."""
    CHANGED = auto()
    """It differs to the same side as the one before: what is measured has changed."""


class Outliers:
    """Holds back a single observation that differs much from the estimate.

    A process that was stopped, or a machine that was suspended, makes a copy look a thousand times
    as slow as it is. Such an observation counts only if the next one differs to the same side.

    factor: a larger difference is not usual.
    """

    __slots__ = ("_factor", "_side")

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._side = 0

    def judge(self, ratio: float) -> Judgement:
        """Judge an observation. ratio: the observed value by the expected one."""
        before, self._side = self._side, 0
        if 1 / self._factor <= ratio <= self._factor:
            return Judgement.USUAL
        side = 1 if ratio > 1 else -1
        if side == before:
            return Judgement.CHANGED
        self._side = side
        return Judgement.HELD


class SteadyAverage(Average):
    """Average that one outlier does not move, and that begins anew after two to the same side.

    The lower of the first two counts if they differ so much.
    """

    __slots__ = ("_outliers",)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._outliers = Outliers(factor)

    def add(self, new: float) -> None:
        if self.num_seen:
            judgement = self._outliers.judge(new / self.value)
            if judgement is Judgement.HELD:
                if self.num_seen == 1:  # the first one often includes one-time costs
                    self.value = min(self.value, new)
                return
            if judgement is Judgement.CHANGED:
                self.num_seen = 0
        super().add(new)
