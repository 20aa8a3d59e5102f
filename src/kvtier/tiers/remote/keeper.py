"""A store from the point of view of maintenance: its entries and their removal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.core.types import BlockKey


@dataclass(frozen=True, slots=True)
class Entry:
    """A block, or a pack of them, under its name in the store.

    age_s: time since its last use if the store knows it, else since it was written.
    """

    name: bytes
    age_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EntryBlocks:
    """Blocks of an entry, by its header. block_bytes: size of each, decoded."""

    block_bytes: int
    keys: list[BlockKey]


class StoreKeeper(ABC):
    """Maintenance access to a store.

    Raises ``CacheError`` if it does not answer, and ``ConfigError`` if it cannot be used.

    where: the store, for messages.
    kind: what an entry is.
    age: phrase for an entry's age, with {} for the time.
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
    def blocks(self, entries: Sequence[Entry]) -> list[EntryBlocks | None]:
        """Return the blocks of each entry, by its header; None if kvtier has not written it."""

    def ours(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that kvtier has written, by their headers."""
        found = self.blocks(entries)
        return [entry for entry, each in zip(entries, found, strict=True) if each is not None]

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove the entries; those that are gone already are ignored."""

    def remove_notes(self, removed: Iterable[bytes], is_real: bool) -> int:
        """Remove manifests that describe only removed entries. Return their number.

        Nothing is removed unless ``is_real``.
        """
        del removed, is_real
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close connections."""
