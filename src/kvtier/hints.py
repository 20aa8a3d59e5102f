"""Hints on prompts from those who know: how long a prompt will be wanted, and whether still.

A hint is never an order. It says what leaves a tier before what, for a bounded time; where nothing
else may leave, anything does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

HIGHEST_PRIORITY = 100
DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 86400.0
MAX_BACK_S = 3600.0
BACK_FACTOR = 2.0
"""A conversation that is to be back in t seconds is waited for as many times t."""
WAIT_S = 600.0
"""Time for which a waiting request's blocks are protected, from the start of the last wait."""
MAX_RANGES = 16
MAX_TOKENS = 1 << 40
END = (1 << 32) - 1
"""Behind the last block of any prompt."""


class Word(IntEnum):
    """One thing that may be said of blocks."""

    KEEP = 0
    """They have a level of their own, also when they were used again."""
    BACK = 1
    """They will be used soon; over when they were."""
    ENDED = 2
    """Blocks of this conversation alone will not be used again. A later use ends the hint."""
    WAITS = 3
    """A request waits for its turn."""
    TURN = 4
    """It does not wait any more."""


class Said(NamedTuple):
    """A word on the blocks ``first`` ..

    ``end`` - 1 of a prompt. level: of ``KEEP``, a priority. until: seconds, on the clock of whoever
    is told; of all but ``TURN``.
    """

    word: int
    level: int
    first: int
    end: int
    until: float


def check_said(said: Said) -> None:
    """Raise ValueError for what nobody can mean."""
    if said.word not in tuple(Word):
        raise ValueError(f"word {said.word} is not in 0 .. {len(Word) - 1}")
    if not 0 <= said.level <= HIGHEST_PRIORITY:
        raise ValueError(f"level {said.level} is not in 0 .. {HIGHEST_PRIORITY}")
    if not 0 <= said.first <= said.end <= END:
        raise ValueError(f"{said.first} .. {said.end} are no places of a prompt")
    if not math.isfinite(said.until):
        raise ValueError(f"now must be a finite number of seconds, not {said.until}")


@dataclass(frozen=True, slots=True)
class Retain:
    """Tokens of a prompt that have a priority for a while.

    priority: 0 .. 100, 50 for as usual; what has a higher one leaves after what has a lower one.
    first_token, last_token: from the one up to before the other, None for the prompt's end; a block
    of which a part lies there counts as a whole. ttl_s: after that many seconds it is as usual.
    """

    priority: int
    first_token: int = 0
    last_token: int | None = None
    ttl_s: float = DEFAULT_TTL_S

    def __post_init__(self) -> None:
        _check_whole("priority", self.priority, HIGHEST_PRIORITY)
        _check_whole("first_token", self.first_token, MAX_TOKENS)
        if self.last_token is not None:
            _check_whole("last_token", self.last_token, MAX_TOKENS)
            if self.last_token <= self.first_token:
                raise ValueError(
                    f"last_token is {self.last_token}, but must be above first_token, which is "
                    f"{self.first_token}"
                )
        _check_seconds("ttl_s", self.ttl_s, MAX_TTL_S)

    def said(self, block_size: int, now: float) -> Said:
        """Return the hint as statements on blocks."""
        first = self.first_token // block_size
        end = END if self.last_token is None else -(-self.last_token // block_size)
        return Said(Word.KEEP, self.priority, min(first, END), min(end, END), now + self.ttl_s)


@dataclass(frozen=True, slots=True)
class Hint:
    """Hint on a request's conversation. Policies that do not learn ignore it.

    retain: counts from when the request's turn comes; of two ranges that overlap the later one.
    back_in_s: after this answer the conversation goes on in about so many seconds, for instance
    when a tool has run. ended: it does not go on after this answer: what no other prompt has of it
    leaves first.
    """

    retain: tuple[Retain, ...] = ()
    back_in_s: float | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        if len(self.retain) > MAX_RANGES:
            raise ValueError(f"retain has {len(self.retain)} ranges; give at most {MAX_RANGES}")
        if self.back_in_s is not None:
            _check_seconds("back_in_s", self.back_in_s, MAX_BACK_S)
            if self.ended:
                raise ValueError("ended and back_in_s say two things; give one of them")

    @property
    def at_begin(self) -> Hint:
        """Return the hints to pass on when the request has its turn."""
        return Hint(retain=self.retain)

    @property
    def at_end(self) -> Hint:
        """Return the hints to pass on when its answer is complete."""
        return Hint(back_in_s=self.back_in_s, ended=self.ended)

    def said(self, block_size: int, now: float) -> list[Said]:
        """All of it, said now, of blocks."""
        words = [each.said(block_size, now) for each in self.retain]
        if self.ended:
            words.append(Said(Word.ENDED, 0, 0, END, now + MAX_TTL_S))
        if self.back_in_s is not None:
            words.append(Said(Word.BACK, 0, 0, END, now + BACK_FACTOR * self.back_in_s))
        return words


def waits(is_waiting: bool, now: float) -> Said:
    """A request begins to wait for its turn, or waits no more."""
    return Said(Word.WAITS if is_waiting else Word.TURN, 0, 0, END, now + WAIT_S)


def parse_hint(given: object) -> Hint:
    """A hint as JSON has it. ValueError with one sentence for what is none."""
    fields = _fields("kvtier", given, ("retain", "back_in_s", "ended"))
    ended = fields.get("ended")
    if not isinstance(ended, bool | None):
        raise ValueError(f"ended is {ended!r:.40}, but must be true or false")
    ranges = fields.get("retain") or []
    if not isinstance(ranges, list):
        raise ValueError(f"retain is {ranges!r:.40}, but must be a list of objects")
    back_in_s = fields.get("back_in_s")
    names = ("first_token", "last_token", "priority", "ttl_s")
    retain: list[Retain] = []
    for each in ranges[: MAX_RANGES + 1]:
        known = _fields("retain", each, names)
        if known.get("priority") is None:
            raise ValueError("retain has a range without a priority; give one of 0 to 100")
        retain.append(Retain(**{k: v for k, v in known.items() if v is not None}))  # type: ignore[arg-type]
    return Hint(tuple(retain), back_in_s, bool(ended))  # type: ignore[arg-type]


def _fields(name: str, given: object, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {given!r:.40}, but must be an object of {', '.join(known)}")
    for field, value in given.items():
        if field not in known and value is not None:
            raise ValueError(f"{name} has {field!r:.40}, but may have {', '.join(known)} only")
    return given


def _check_whole(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}, but must be a whole number in 0 .. {most}")


def _check_seconds(name: str, value: object, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:  # type: ignore[operator]
        raise ValueError(
            f"{name} is {value!r:.40}, but must be a number of seconds above 0, {most:.0f} at most"
        )
