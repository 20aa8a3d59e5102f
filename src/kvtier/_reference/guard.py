"""When to stop learning: the twin of ``native/policy/guard.hpp``."""

from __future__ import annotations

FREE_SHARE = 0.0005
MOST_DEBT = 0.05
MOST_UNEVEN_DEBT = 0.2
MOST_CREDIT = 4.0
FIRST_REST = 40.0
UNIT_SHARE = 0.01


class Guard:
    """Says where least recently used first has more hits."""

    def __init__(self, capacity: int) -> None:
        self.is_lru = False
        self.is_uneven = False
        self._unit = 1.0
        self._debt = 0.0
        self._rest = 0.0
        self.set_capacity(capacity)

    def set_capacity(self, capacity: int) -> None:
        self._capacity = float(capacity)
        self._patience = FIRST_REST * self._capacity

    def judge(self, num: float, lost: float, usual: float) -> None:
        self._unit += UNIT_SHARE * (usual - self._unit)
        most_debt = MOST_UNEVEN_DEBT if self.is_uneven else MOST_DEBT
        most_credit = MOST_CREDIT * self._capacity * self._unit
        self._debt = max(-most_credit, self._debt + lost - FREE_SHARE * num * usual)
        if self.is_lru:
            self._rest -= num
            if self._rest > 0.0:
                return
            self.is_lru = False
            self._debt = min(self._debt, 0.0)
        elif self._debt > most_debt * self._capacity * self._unit:
            self.is_lru = True
            self._rest = self._patience
            self._patience *= 2.0
        elif self._debt <= -most_credit:
            self._patience = FIRST_REST * self._capacity
