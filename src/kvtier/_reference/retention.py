"""What was said of runs: the twin of ``native/policy/retention.hpp``, which says what it means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from kvtier.hints import USUAL_PRIORITY, Said, Word

USUAL = USUAL_PRIORITY
LEAVES_FIRST = 0
BACK_SOON = 101
WAITED_FOR = 102
NUM_LEVELS = 103
MOST_WAITING = 0xFFFF


@dataclass(frozen=True, slots=True)
class Retention:
    kept_until: float = -inf
    passes_until: float = -inf
    waits_until: float = -inf
    num_waiting: int = 0
    kept: int = USUAL
    passing: int = USUAL

    @property
    def level(self) -> int:
        if self.num_waiting:
            return WAITED_FOR
        return self.kept if self.passing == USUAL else self.passing

    @property
    def ends(self) -> float:
        """When a word of it is over next."""
        waits = self.waits_until if self.num_waiting else inf
        passes = inf if self.passing == USUAL else self.passes_until
        return min(waits, passes, inf if self.kept == USUAL else self.kept_until)

    def at(self, now: float) -> Retention:
        """Without what is over."""
        it = self
        if it.num_waiting == 0 or it.waits_until <= now:
            it = replace(it, num_waiting=0, waits_until=-inf)
        if it.passing == USUAL or it.passes_until <= now:
            it = replace(it, passing=USUAL, passes_until=-inf)
        if it.kept == USUAL or it.kept_until <= now:
            it = replace(it, kept=USUAL, kept_until=-inf)
        return it

    def after_use(self, now: float) -> Retention:
        if self is NOTHING:
            return self
        return replace(self, passing=USUAL).at(now)

    def with_word(self, said: Said, now: float) -> Retention:
        it, until = self.at(now), said.until
        if said.word == Word.KEEP:
            it = replace(it, kept=said.level, kept_until=until)
        elif said.word == Word.BACK:
            longest = max(it.passes_until, until) if it.passing == BACK_SOON else until
            it = replace(it, passing=BACK_SOON, passes_until=longest)
        elif said.word == Word.ENDED:
            it = replace(it, passing=LEAVES_FIRST, passes_until=until)
        elif said.word == Word.WAITS:
            num_waiting = min(MOST_WAITING, it.num_waiting + 1)
            it = replace(it, num_waiting=num_waiting, waits_until=max(it.waits_until, until))
        else:
            it = replace(it, num_waiting=max(0, it.num_waiting - 1))
        return it.at(now)


NOTHING = Retention()
