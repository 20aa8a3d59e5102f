"""Hints by clients and engines on the future use of a prompt's blocks.

A hint changes the order of eviction for a bounded time. It never forbids eviction: if nothing else
can be evicted, protected blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

HIGHEST_PRIORITY = 100
DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 86400.0
MAX_BACK_S = 3600.0
BACK_FACTOR = 2.0
"""Factor by which the expected pause of a conversation is multiplied, for the time it is
protected."""
WAIT_S = 600.0
"""Time for which a queued request's blocks are protected, from the start of the last wait."""
MAX_RANGES = 16
MAX_ACTIONS = 64
"""Most actions of an envelope that are read."""
MAX_TOKENS = 1 << 40
END = (1 << 32) - 1
"""Position behind the last block of any prompt."""


class HintKind(IntEnum):
    """Kind of a statement on blocks."""

    KEEP = 0
    """The blocks have a priority, which a use does not end."""
    BACK = 1
    """The blocks will be used soon. A use ends the statement."""
    ENDED = 2
    """Blocks of this conversation alone will not be used again. A use ends the statement."""
    WAITS = 3
    """A request is queued."""
    TURN = 4
    """The request is queued no longer."""


class BlockHint(NamedTuple):
    """Statement on some blocks of a prompt.

    Attributes:
        word: a ``HintKind``, the kind of statement.
        level: priority, for ``KEEP``.
        first: position of the first block.
        end: position behind the last block.
        until: time at which it expires, in seconds on the cache's clock; unused by ``TURN``.
    """

    word: int
    level: int
    first: int
    end: int
    until: float


def check_block_hint(block_hint: BlockHint) -> None:
    """Raise ValueError if a field is out of range."""
    if block_hint.word not in tuple(HintKind):
        raise ValueError(f"word {block_hint.word} is not in 0 .. {len(HintKind) - 1}")
    if not 0 <= block_hint.level <= HIGHEST_PRIORITY:
        raise ValueError(f"level {block_hint.level} is not in 0 .. {HIGHEST_PRIORITY}")
    if not 0 <= block_hint.first <= block_hint.end <= END:
        raise ValueError(f"{block_hint.first} .. {block_hint.end} are no places of a prompt")
    if not math.isfinite(block_hint.until):
        raise ValueError(f"now must be a finite number of seconds, not {block_hint.until}")


@dataclass(frozen=True, slots=True)
class Retain:
    """Priority of a range of a prompt's tokens, for a limited time.

    Args:
        priority: 0 to 100; the default for blocks without a hint is 50. Blocks of lower priority
            are evicted first.
        first_token: first token of the range. Blocks that overlap the range belong to it.
        last_token: token behind the range; None for the prompt's end.
        ttl_s: seconds after which the priority expires.
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

    def block_hint(self, block_size: int, now: float) -> BlockHint:
        """Return the priority as a statement on blocks."""
        first = self.first_token // block_size
        end = END if self.last_token is None else -(-self.last_token // block_size)
        return BlockHint(
            HintKind.KEEP, self.priority, min(first, END), min(end, END), now + self.ttl_s
        )


@dataclass(frozen=True, slots=True)
class Hint:
    """Hint on a request's conversation. Policies that do not learn ignore it.

    Args:
        retain: priorities of token ranges, from the time at which the request is scheduled. If two
            ranges overlap, the later one in the list applies.
        back_in_s: seconds after this answer in which the conversation is expected to continue, for
            instance when a tool has run.
        ended: whether the conversation ends with this answer. Blocks that no other prompt shares
            are then evicted first.
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
        """Hints to apply when the request is scheduled."""
        return Hint(retain=self.retain)

    @property
    def at_end(self) -> Hint:
        """Hints to apply when the answer is complete."""
        return Hint(back_in_s=self.back_in_s, ended=self.ended)

    def block_hint(self, block_size: int, now: float) -> list[BlockHint]:
        """Return the hint as statements on blocks, valid from ``now``."""
        words = [each.block_hint(block_size, now) for each in self.retain]
        if self.ended:
            words.append(BlockHint(HintKind.ENDED, 0, 0, END, now + MAX_TTL_S))
        if self.back_in_s is not None:
            words.append(BlockHint(HintKind.BACK, 0, 0, END, now + BACK_FACTOR * self.back_in_s))
        return words


def waits(is_waiting: bool, now: float) -> BlockHint:
    """Return the statement that a request has been queued, or is queued no longer."""
    return BlockHint(HintKind.WAITS if is_waiting else HintKind.TURN, 0, 0, END, now + WAIT_S)


def parse_hint(given: object) -> Hint:
    """Return a hint from its JSON value; raise ValueError with one sentence if it is malformed."""
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
    for range_ in ranges[: MAX_RANGES + 1]:
        known = _fields("retain", range_, names)
        if known.get("priority") is None:
            raise ValueError("retain has a range without a priority; give one of 0 to 100")
        retain.append(Retain(**{k: v for k, v in known.items() if v is not None}))  # type: ignore[arg-type]
    return Hint(tuple(retain), back_in_s, bool(ended))  # type: ignore[arg-type]


class HintAction(StrEnum):
    """Kind of an action in an orchestrator's envelope, as kvtier counts it."""

    FETCH = "kv.fetch"
    """``kv.fetch@1.0``: blocks of this prompt are elsewhere. Every prompt is looked up in all tiers
    anyway; kvtier reads from no peer, so the source that it names is not contacted."""
    HINT = "kvtier.hint"
    """``kvtier.hint@1.0``: its payload is a hint, as ``parse_hint`` reads it."""
    UNKNOWN = "unknown"
    """Ignored, since kvtier does not know it."""
    INVALID = "invalid"
    """Ignored, since it can't be understood."""


class KvHints(NamedTuple):
    """Content of an orchestrator's envelope.

    hint: of its last valid ``kvtier.hint`` action. actions: kind of each action.
    """

    hint: Hint | None = None
    actions: tuple[HintAction, ...] = ()


def parse_kv_hints(given: object) -> KvHints:
    """Return the content of the envelope that an orchestrator attached to a request.

    Never raises: the client did not write the envelope and could not correct it.

    given: ``kv_hints`` of vLLM 0.32 and newer, of SGLang, and of Dynamo, as their structure or as
        the object of its JSON: protocol_version, message_id, actions. None for none.
    """
    if given is None:
        return KvHints()
    version, actions = _entry(given, "protocol_version"), _entry(given, "actions")
    if not isinstance(version, str) or not isinstance(actions, list | tuple):
        return KvHints(None, (HintAction.INVALID,))
    if not version.startswith("0."):
        return KvHints(None, (HintAction.UNKNOWN,) * min(len(actions), MAX_ACTIONS))
    hint: Hint | None = None
    kinds: list[HintAction] = []
    for action in actions[:MAX_ACTIONS]:
        kind, found = _parse_action(action)
        kinds.append(kind)
        hint = hint if found is None else found
    return KvHints(hint, tuple(kinds))


def _parse_action(action: object) -> tuple[HintAction, Hint | None]:
    name, version = _entry(action, "action_type"), _entry(action, "action_version")
    payload = _entry(action, "payload")
    if not isinstance(name, str) or not isinstance(version, str) or not isinstance(payload, dict):
        return HintAction.INVALID, None
    if version.partition(".")[0] != "1":
        return HintAction.UNKNOWN, None
    if name == HintAction.FETCH:
        is_valid = isinstance(payload.get("block_hashes"), list)
        return HintAction.FETCH if is_valid else HintAction.INVALID, None
    if name != HintAction.HINT:
        return HintAction.UNKNOWN, None
    try:
        return HintAction.HINT, parse_hint(payload)
    except ValueError:
        return HintAction.INVALID, None


def _entry(given: object, name: str) -> object:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


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
