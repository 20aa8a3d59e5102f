"""How soon a block will be used again, learned from what was used again before.

Blocks are put into classes: by how often they were used, and by how many turns their prompt has
grown over. Per class, ages are counted at which blocks were used again, or given up. The value of a
block of age a is its Gittins index: the best rate, over all horizons h, of

    P(used again before a + h) / E[time until then, h at most]                 time: in requests

Source: the index that learned leaf policies for prefix caches use; classes with little history lean
on what all have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

NUM_AGES = 40
FIRST_AGES = [0.0] + [2.0 ** (step / 2) for step in range(NUM_AGES - 1)]
"""Buckets of ages: from here up to the next one; half a power of two wide."""
WIDTHS = np.diff([*FIRST_AGES, 2.0 ** ((NUM_AGES - 1) / 2)])
SHARED = 0.05
"""Weight of what all classes saw, in each of them."""
FADE = 0.99
"""Weight of what was learned before, at each ``learn``."""


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one class that were last used by one request. count: that still are."""

    kind: int
    last: int
    count: int = 0


@dataclass(slots=True)
class _Ages:
    """Per class and age, how many uses; and the time beyond the first age of the bucket, summed."""

    reused: list[list[float]]
    ended: list[list[float]]
    beyond: list[list[float]]

    @classmethod
    def none(cls, num_kinds: int) -> _Ages:
        return cls(*([[0.0] * NUM_AGES for _ in range(num_kinds)] for _ in range(3)))

    def fade(self) -> None:
        for table in (self.reused, self.ended, self.beyond):
            for row in table:
                row[:] = [FADE * each for each in row]


@dataclass(slots=True)
class ReuseModel:
    """Values of blocks. uses: buckets of use counts, the last one open; turns: likewise.

    The kinds are numbered so that more uses of the same turn are never worth less.
    """

    num_uses: int = 4
    num_turns: int = 4
    values: list[list[float]] = field(init=False)
    _ages: _Ages = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    @property
    def num_kinds(self) -> int:
        return self.num_uses * self.num_turns

    def forget(self) -> None:
        """As in the beginning: what was used last is worth most."""
        self._ages = _Ages.none(self.num_kinds)
        self.values = [[1 / (1 + first) for first in FIRST_AGES] for _ in range(self.num_kinds)]

    def kind(self, num_uses: int, turn: int) -> int:
        """The class of a block."""
        return _bucket(num_uses - 1, self.num_uses) * self.num_turns + _bucket(turn, self.num_turns)

    def value(self, batch: Batch, now: int) -> float:
        """Of one of its blocks: uses to be expected per request, at best."""
        return self.values[batch.kind][_age(now - batch.last)]

    @property
    def value_of_new(self) -> float:
        """Of a block that was just computed for the first time."""
        return self.values[0][0]

    def used_again(self, batch: Batch, now: int) -> None:
        """A block of the batch was."""
        age = now - batch.last
        at = _age(age)
        self._ages.reused[batch.kind][at] += 1
        self._end(self._ages, batch.kind, age, at, 1)

    def given_up(self, batch: Batch, now: int) -> None:
        """A block of the batch was not used again as long as it was remembered."""
        age = now - batch.last
        self._end(self._ages, batch.kind, age, _age(age), 1)

    def learn(self, waiting: Iterable[Batch], now: int) -> None:
        """Work the values out anew. waiting: batches of which it is not known yet what will be."""
        seen = self._ages
        open_ = _Ages(
            seen.reused, *([row[:] for row in each] for each in (seen.ended, seen.beyond))
        )
        for batch in waiting:
            age = now - batch.last
            self._end(open_, batch.kind, age, _age(age), batch.count)
        reused, ended, beyond = (
            np.array(table) for table in (open_.reused, open_.ended, open_.beyond)
        )
        # Time that blocks spent in a bucket: all of it by those that ended later.
        later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
        spent = later * WIDTHS + beyond
        reused = reused + SHARED * reused.sum(axis=0)
        spent = spent + SHARED * spent.sum(axis=0)
        values = np.empty_like(spent)
        prior = 1 / (1 + np.array(FIRST_AGES))
        for age in range(NUM_AGES):
            uses = np.cumsum(reused[:, age:], axis=1) + prior[age:]
            values[:, age] = (uses / (np.cumsum(spent[:, age:], axis=1) + 1)).max(axis=1)
        values = np.minimum.accumulate(values, axis=1)
        by_uses = values.reshape(self.num_uses, self.num_turns, NUM_AGES)
        self.values = np.maximum.accumulate(by_uses, axis=0).reshape(values.shape).tolist()
        seen.fade()

    @staticmethod
    def _end(ages: _Ages, kind: int, age: int, at: int, count: int) -> None:
        ages.ended[kind][at] += count
        ages.beyond[kind][at] += count * max(0.5, age - FIRST_AGES[at])


def _age(age: int) -> int:
    """The bucket of an age."""
    return 0 if age < 1 else min(1 + int(2 * math.log2(age) + 1e-9), NUM_AGES - 1)


def _bucket(count: int, num_buckets: int) -> int:
    """0, 1, 2 to 4, more."""
    return min(0 if count <= 0 else 1 if count == 1 else 2 if count <= 4 else 3, num_buckets - 1)
