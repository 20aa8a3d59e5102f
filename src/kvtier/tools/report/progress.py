"""Progress of an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Progress(ABC):
    """Told by the experiments; shown by whoever runs them."""

    @abstractmethod
    def begin(self, title: str, num_steps: int) -> None:
        """A new experiment begins, with that many steps."""

    @abstractmethod
    def advance(self, note: str = "") -> None:
        """One step is done. note: what was just learnt, in a few words."""


class Silence(Progress):
    """Shows nothing."""

    def begin(self, title: str, num_steps: int) -> None:
        return

    def advance(self, note: str = "") -> None:
        return
