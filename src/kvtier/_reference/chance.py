"""Chance that is the same on every machine."""

from __future__ import annotations

WORD = (1 << 64) - 1


class Random:
    """splitmix64."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, end: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & WORD
        bits = self._state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & WORD
        return ((bits ^ (bits >> 31)) >> 32) * end >> 32
