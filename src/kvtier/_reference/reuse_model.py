"""How soon blocks will be used again, learned from what was used again before: the twin of
``native/policy/reuse.hpp``, which says what is counted and what a value is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

NUM_AGES = 44
FIRST_AGE = 0.25
"""Seconds: the first bucket of ages is below it."""
EDGES = [0.0] + [
    math.ldexp(FIRST_AGE if at % 2 else FIRST_AGE * math.sqrt(2.0), (at - 1) // 2)
    for at in range(1, NUM_AGES + 1)
]
"""Seconds: of the buckets, two to each doubling."""
FADE = 0.98
LEANING = 2.0
LEAST_SHARE = 0.1
NOTHING = 1e-9

Features = tuple[int, ...]
Waiting = tuple[int, float, float]
"""Class, age, weight."""


def _zeros() -> list[float]:
    return [0.0] * NUM_AGES


@dataclass(slots=True)
class _Counts:
    """Per age: uses, ends, and the time that those that ended there had spent there."""

    uses: list[float] = field(default_factory=_zeros)
    ended: list[float] = field(default_factory=_zeros)
    beyond: list[float] = field(default_factory=_zeros)

    def copy(self) -> _Counts:
        return _Counts(self.uses[:], self.ended[:], self.beyond[:])

    def add(self, other: _Counts) -> None:
        for mine, its in (
            (self.uses, other.uses),
            (self.ended, other.ended),
            (self.beyond, other.beyond),
        ):
            mine[:] = [one + another for one, another in zip(mine, its, strict=True)]

    def fade(self) -> None:
        for row in (self.uses, self.ended, self.beyond):
            row[:] = [FADE * each for each in row]

    def count(self, age: float, weight: float, *, is_use: bool) -> None:
        at = bucket(age)
        if is_use:
            self.uses[at] += weight
        self.ended[at] += weight
        self.beyond[at] += weight * max(LEAST_SHARE * (EDGES[at + 1] - EDGES[at]), age - EDGES[at])


@dataclass(slots=True)
class _Learned:
    """What is known of one class. values: None until they are asked for."""

    above: int
    hazards: list[float]
    values: list[float] | None = None
    seen: _Counts = field(default_factory=_Counts)


def bucket(age: float) -> int:
    """Of an age in seconds."""
    if age < EDGES[1]:
        return 0
    if age >= EDGES[NUM_AGES]:
        return NUM_AGES - 1
    at = 2 * math.frexp(age / FIRST_AGE)[1] - 1
    return at if age < EDGES[at + 1] else at + 1


class ReuseModel:
    """Classes of blocks, and what a block of a class and an age is worth."""

    def __init__(self) -> None:
        self._classes = [_Learned(0, [NOTHING / (1.0 + edge) for edge in EDGES[:NUM_AGES]])]
        self._numbers: dict[Features, int] = {}
        self.has_learned = False

    def class_of(self, features: Features) -> int:
        """Made when it is first met."""
        above = 0
        for end in range(1, len(features) + 1):
            number = self._numbers.get(features[:end])
            if number is None:
                number = self._numbers[features[:end]] = len(self._classes)
                its = self._classes[above]
                self._classes.append(_Learned(above, its.hazards, its.values))
            above = number
        return above

    def used(self, number: int, age: float, weight: float) -> None:
        """A piece of this class was used again at this age."""
        self._classes[number].seen.count(age, weight, is_use=True)

    def forgotten(self, number: int, age: float, weight: float) -> None:
        """A piece of this class was not used up to this age, and is known no more."""
        self._classes[number].seen.count(age, weight, is_use=False)

    def learn(self, waiting: Iterable[Waiting]) -> None:
        """Work the hazards out; what was seen before fades."""
        counts = [each.seen.copy() for each in self._classes]
        for number, age, weight in waiting:
            counts[number].count(age, weight, is_use=False)
        for number in range(len(counts) - 1, 0, -1):
            counts[self._classes[number].above].add(counts[number])
        for number, each in enumerate(self._classes):
            above = self._classes[each.above].hazards if number else None
            each.hazards = _hazards(counts[number], above)
            each.values = None
            each.seen.fade()
        self.has_learned = True

    def value(self, number: int, age: float) -> float:
        """Of a block that was used last ``age`` seconds ago."""
        values = self._values(number)
        at = bucket(age)
        if at + 1 == NUM_AGES:
            return values[at]
        beyond = min(1.0, (age - EDGES[at]) / (EDGES[at + 1] - EDGES[at]))
        return values[at] * (1.0 - beyond) + values[at + 1] * beyond

    def value_of_new(self, number: int) -> float:
        """Of a block that is used now."""
        return self._values(number)[0]

    def chance(self, number: int, price: float) -> float:
        """That a new block is used again before it is worth no more than ``price``."""
        expected = 0.0
        for at, value in enumerate(self._values(number)):
            if value <= price:
                break
            expected += self._classes[number].hazards[at] * (EDGES[at + 1] - EDGES[at])
        return 1.0 - math.exp(-expected)

    def _values(self, number: int) -> list[float]:
        it = self._classes[number]
        if it.values is None:
            it.values = _gittins(it.hazards)
        return it.values


def _hazards(counts: _Counts, above: list[float] | None) -> list[float]:
    """Uses per second at each age; ``above``: those of the class above, None for the first one."""
    hazards = _zeros()
    later = 0.0
    for at in range(NUM_AGES - 1, -1, -1):
        spent = later * (EDGES[at + 1] - EDGES[at]) + counts.beyond[at]
        later += counts.ended[at]
        if above is None:
            hazards[at] = (counts.uses[at] + NOTHING) / (spent + 1.0)
        else:
            hazards[at] = (counts.uses[at] + LEANING) / (spent + LEANING / above[at])
    return hazards


def _gittins(hazards: list[float]) -> list[float]:
    """The best rate of uses from each age on, over all horizons."""
    values = _zeros()
    later: list[tuple[float, float, float]] = []
    for at in range(NUM_AGES - 1, -1, -1):
        width = EDGES[at + 1] - EDGES[at]
        expected = hazards[at] * width
        stays = math.exp(-expected)
        short = width * (1.0 - expected / 2.0)
        takes = short if expected < 1e-6 else (1.0 - stays) / hazards[at]
        used, spent, unused = 1.0 - stays, takes, stays
        while later and later[-1][0] * spent > used * later[-1][1]:
            next_used, next_spent, next_unused = later.pop()
            used += unused * next_used
            spent += unused * next_spent
            unused *= next_unused
        later.append((used, spent, unused))
        values[at] = used / spent
    return values
