"""Requests of a running cache's control, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.errors import CacheError
from kvtier.core.hints import Hint, parse_hint

MAX_PIN_S = 7 * 86400.0
"""Longest time of a pin."""
MAX_WAIT_S = 3600.0
"""Longest wait of one request."""


class ControlError(CacheError):
    """A request can't be carried out. is_unknown: because what it names does not exist."""

    def __init__(self, reason: str, is_unknown: bool = False) -> None:
        super().__init__(reason)
        self.is_unknown = is_unknown


@dataclass(frozen=True, slots=True)
class PromptName:
    """Name of a prompt: by the keys of its blocks in a node, by its text or tokens in a server.

    room: name of a node's room; "" for the only one. keys: in hexadecimal. tenant: in a server the
    ``cache_salt``. chat: fields of a chat request, instead of a text or tokens.
    """

    room: str = ""
    keys: Sequence[str] | None = None
    prompt: str | Sequence[int] | None = None
    tenant: str = ""
    chat: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class PromptPlaces:
    """Locations of the blocks of a prompt.

    in_memory: how many of the first blocks are in memory. found: how many of the first blocks are
    in memory or storage. places: per block "memory", "arriving", "storage", "unknown" or "nowhere".
    """

    room: str
    blocks: int
    in_memory: int
    found: int
    places: Sequence[str]

    @classmethod
    def of(cls, room: str, places: Sequence[str]) -> PromptPlaces:
        """Return the locations with their counts."""

        def first(*kinds: str) -> int:
            return next((at for at, place in enumerate(places) if place not in kinds), len(places))

        in_memory, found = first("memory"), first("memory", "arriving", "storage")
        return cls(room, len(places), in_memory, found, places)


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Result of a pin. number: its name; 0 if nothing was pinned. pinned: how many blocks are."""

    room: str
    number: int
    blocks: int
    pinned: int


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """Results of a hint. blocks: of the prompt. hints: the result of each action."""

    room: str
    blocks: int
    hints: Sequence[Mapping[str, str | int]]


@dataclass(frozen=True, slots=True)
class Deleted:
    """Result of a deletion.

    is_complete: whether every tier has confirmed it. blocks: how many were named; None for whole
    rooms. problems: what is missing.
    """

    is_complete: bool
    rooms: Sequence[str]
    blocks: int | None
    problems: Sequence[str]


class CacheControl(Protocol):
    """Changes and look-ups of one cache. Methods raise ``CacheError`` for what can't be done."""

    async def lookup(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        """Find the blocks of a prompt."""

    async def prefetch(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        """Read the blocks of a prompt from storage into memory."""

    async def pin(self, prompt: PromptName, seconds: float, timeout_s: float) -> PinnedBlocks:
        """Keep the blocks of a prompt in memory for a time."""

    async def unpin(self, room: str, number: int) -> None:
        """End a pin before its time."""

    async def hint(self, prompt: PromptName, hint: Hint) -> HintedPrompt:
        """Apply a hint to a prompt, and wait for nothing. A node counts tokens in blocks."""

    async def delete(self, prompt: PromptName, timeout_s: float) -> Deleted:
        """Delete the blocks of a prompt from every tier."""

    async def delete_rooms(self, room: str, tenant: str, timeout_s: float) -> Deleted:
        """Delete all blocks of a room or a tenant from every tier."""

    async def clear(self, room: str, memory_only: bool, timeout_s: float) -> Deleted:
        """Delete the blocks of one room, or of all; or only evict them from memory."""


def check_wait(timeout_s: float) -> float:
    """Return a time-out. Raises ``ControlError`` if it is out of bounds."""
    if not 0 <= timeout_s <= MAX_WAIT_S:
        raise ControlError(f"timeout_s: {timeout_s} s; give 0 to {MAX_WAIT_S:.0f}")
    return timeout_s


def read_hint(given: object) -> Hint:
    """Return a hint from its JSON value. Raises ``ControlError`` if it is malformed."""
    try:
        return parse_hint(given)
    except ValueError as error:
        raise ControlError(str(error)) from None


def check_pin(seconds: float) -> float:
    """Return the time of a pin. Raises ``ControlError`` if it is out of bounds."""
    if not 0 < seconds <= MAX_PIN_S:
        raise ControlError(f"a pin lasts more than 0 and at most {MAX_PIN_S:.0f} s")
    return seconds
