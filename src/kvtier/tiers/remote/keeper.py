"""A store as those see it who look after it: what is in it, and what goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A block, or a pack of them, as the store calls it.

    age_s: since it was used, where the store knows that, else since it was written.
    """

    name: bytes
    age_s: float
    num_bytes: int


class StoreKeeper(ABC):
    """A store, for those who look after it.

    Raises ``CacheError`` where it does not answer, and ``ConfigError`` where it can't be used.

    kind: what an entry is. age: what their age is, with {} for the time.
    """

    where: str
    kind: str
    age: str

    @abstractmethod
    def test(self) -> str:
        """Test that the store does what kvtier relies on, and describe it in words.

        Raises if not.
        """

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Return the entries that seem to be kvtier's."""

    @abstractmethod
    def ours(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that kvtier has written, by their headers."""

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> None:
        """They go; those that have gone meanwhile are passed over."""

    def remove_notes(self, removed: Iterable[bytes], is_real: bool) -> int:
        """Remove notes that describe only these entries, and others that are gone. Return how many.

        Nothing is removed in a dry run.
        """
        del removed, is_real
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give connections back."""
