"""Progress of an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Progress(ABC):
    """Progress reported by experiments; subclasses show it."""

    @abstractmethod
    def begin(self, title: str, num_steps: int) -> None:
        """Begin a new experiment of ``num_steps`` steps."""

    @abstractmethod
    def advance(self, note: str = "") -> None:
        """Report that one step is done. note: its result, in a few words."""


class NoProgress(Progress):
    """Shows nothing."""

    def begin(self, title: str, num_steps: int) -> None:
        return

    def advance(self, note: str = "") -> None:
        return
