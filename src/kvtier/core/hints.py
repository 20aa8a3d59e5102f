"""Hints by clients and engines on the future use of a prompt's blocks.

A hint changes the order of eviction for a bounded time, or moves blocks between memory and storage.
It never forbids eviction: if nothing else can be evicted, protected blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

HIGHEST_PRIORITY = 100
DEFAULT_PRIORITY = 50
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
    PREFETCH = 5
    """The blocks are needed in memory by a time. Eviction policies get ``BACK`` instead."""
    DEMOTE = 6
    """The blocks leave memory if a slower tier has them. Policies get ``KEEP`` with level 0."""


OF_POLICIES = tuple(kind for kind in HintKind if kind <= HintKind.TURN)
"""Kinds of statements that eviction policies take."""


class Action(StrEnum):
    """Action of a client's hint, as answers and metrics name it."""

    PIN = "pin"
    """A priority above the default: evicted last, as far as the tenant's share goes."""
    RETAIN = "retain"
    """Any other priority."""
    BACK = "back"
    RELEASE = "release"
    """The session has ended: the blocks that only it has are evicted first."""
    PREFETCH = "prefetch"
    DEMOTE = "demote"


class HintOutcome(StrEnum):
    """Result of an action."""

    DONE = "done"
    SCHEDULED = "scheduled"
    """A prefetch begins later, so that it ends in time."""
    BEGUN = "begun"
    """A prefetch reads blocks now."""
    IN_MEMORY = "in_memory"
    """There was nothing to prefetch."""
    ABSENT = "absent"
    """No storage has the blocks, or it did not answer in time."""
    SHARE = "share"
    """Declined: other prefetches use up the share of memory of the tenant, or of all tenants."""
    NO_STORAGE = "no_storage"
    """Declined: there is no storage, or no memory that it is read into."""
    NO_POLICY = "no_policy"
    """Declined: the eviction policy follows no hints."""
    OFF = "off"
    """Declined: hints of clients are off."""
    SENT = "sent"
    """Passed on to the node, which decides, and counts the result."""
    USED = "used"
    """The request for which blocks were prefetched came."""
    EXPIRED = "expired"
    """It did not come in time."""


class HintResult(NamedTuple):
    """Result of one action of a hint.

    num_blocks: blocks to which it applied; for a priority, those of the prompt that it names.
    """

    action: Action
    outcome: HintOutcome
    num_blocks: int = 0

    def as_json(self) -> dict[str, str | int]:
        """Return it as an answer has it."""
        action, outcome = self.action.value, self.outcome.value
        return {"action": action, "outcome": outcome, "blocks": self.num_blocks}


class BlockHint(NamedTuple):
    """Statement on some blocks of a prompt.

    Attributes:
        word: a ``HintKind``, the kind of statement.
        level: priority, for ``KEEP``.
        first: position of the first block.
        end: position behind the last block.
        until: time at which it expires, in seconds on the cache's clock; for ``PREFETCH`` the time
            by which the blocks are needed; unused by ``TURN`` and ``DEMOTE``.
    """

    word: int
    level: int
    first: int
    end: int
    until: float

    @property
    def action(self) -> Action:
        """The action of a client's statement."""
        if self.word == HintKind.KEEP:
            return Action.PIN if self.level > DEFAULT_PRIORITY else Action.RETAIN
        return ACTIONS[HintKind(self.word)]

    def num_of(self, num_blocks: int) -> int:
        """Return how many of a prompt's blocks the statement is on."""
        return max(0, min(self.end, num_blocks) - self.first)


ACTIONS = {
    HintKind.BACK: Action.BACK,
    HintKind.ENDED: Action.RELEASE,
    HintKind.PREFETCH: Action.PREFETCH,
    HintKind.DEMOTE: Action.DEMOTE,
}


def check_block_hint(block_hint: BlockHint) -> None:
    """Raise ValueError if a field is out of range, or policies do not know the statement."""
    if block_hint.word not in OF_POLICIES:
        raise ValueError(f"word {block_hint.word} is not in 0 .. {HintKind.TURN:d}")
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
        prefetch_within_s: seconds after this answer by which the prompt's blocks are needed in
            memory. Evicted blocks are read from storage shortly before.
        demote_from: token from which on the prompt's blocks leave memory after this answer, if a
            slower tier has them; the others are evicted first.
    """

    retain: tuple[Retain, ...] = ()
    back_in_s: float | None = None
    ended: bool = False
    prefetch_within_s: float | None = None
    demote_from: int | None = None

    def __post_init__(self) -> None:
        if len(self.retain) > MAX_RANGES:
            raise ValueError(f"retain has {len(self.retain)} ranges; give at most {MAX_RANGES}")
        if self.back_in_s is not None:
            _check_seconds("back_in_s", self.back_in_s, MAX_BACK_S)
            if self.ended:
                raise ValueError("ended and back_in_s say two things; give one of them")
            if self.demote_from is not None:
                raise ValueError("demote and back_in_s say two things; give one of them")
        if self.prefetch_within_s is not None:
            _check_seconds("within_s", self.prefetch_within_s, MAX_BACK_S)
            if self.ended:
                raise ValueError("ended and prefetch say two things; give one of them")
        if self.demote_from is not None:
            _check_whole("first_token", self.demote_from, MAX_TOKENS)

    @property
    def at_begin(self) -> Hint:
        """Hints to apply when the request is scheduled."""
        return Hint(retain=self.retain)

    @property
    def at_end(self) -> Hint:
        """Hints to apply when the answer is complete, while its blocks are still in use."""
        return Hint(back_in_s=self.back_in_s, ended=self.ended)

    @property
    def after_end(self) -> Hint:
        """Hints to apply when the request uses its blocks no longer."""
        return Hint(prefetch_within_s=self.prefetch_within_s, demote_from=self.demote_from)

    def block_hint(self, block_size: int, now: float) -> list[BlockHint]:
        """Return the hint as statements on blocks, valid from ``now``."""
        words = [each.block_hint(block_size, now) for each in self.retain]
        if self.ended:
            words.append(BlockHint(HintKind.ENDED, 0, 0, END, now + MAX_TTL_S))
        if self.back_in_s is not None:
            words.append(BlockHint(HintKind.BACK, 0, 0, END, now + BACK_FACTOR * self.back_in_s))
        if self.demote_from is not None:
            first = min(self.demote_from // block_size, END)
            words.append(BlockHint(HintKind.DEMOTE, 0, first, END, now + DEFAULT_TTL_S))
        if self.prefetch_within_s is not None:
            words.append(BlockHint(HintKind.PREFETCH, 0, 0, END, now + self.prefetch_within_s))
        return words

    def declined(self, outcome: HintOutcome) -> list[HintResult]:
        """Return the results if nothing is done, for the same reason."""
        return [HintResult(word.action, outcome) for word in self.block_hint(1, 0.0)]


def waits(is_waiting: bool, now: float) -> BlockHint:
    """Return the statement that a request has been queued, or is queued no longer."""
    return BlockHint(HintKind.WAITS if is_waiting else HintKind.TURN, 0, 0, END, now + WAIT_S)


def parse_hint(given: object) -> Hint:
    """Return a hint from its JSON value; raise ValueError with one sentence if it is malformed."""
    fields = _fields("kvtier", given, ("retain", "back_in_s", "ended", "prefetch", "demote"))
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
    within_s, demote_from = None, None
    if fields.get("prefetch") is not None:
        within_s = _fields("prefetch", fields["prefetch"], ("within_s",)).get("within_s")
        if within_s is None:
            raise ValueError("prefetch has no time; give within_s, a number of seconds")
    if fields.get("demote") is not None:
        demote_from = _fields("demote", fields["demote"], ("first_token",)).get("first_token", 0)
    return Hint(tuple(retain), back_in_s, bool(ended), within_s, demote_from)  # type: ignore[arg-type]


class HintAction(StrEnum):
    """Kind of an action in an orchestrator's envelope, as kvtier counts it."""

    FETCH = "kv.fetch"
    """``kv.fetch@1.0``: blocks of this prompt are elsewhere. Every prompt is looked up in all tiers
    anyway; kvtier reads from no peer, so the source that it names is not contacted."""
    HINT = "kvtier.hint"
    """``kvtier.hint@1.0``: its payload is a hint, as ``parse_hint`` reads it."""
    PREFETCH = "kvtier.prefetch"
    """``kvtier.prefetch@1.0``: its payload is the field ``prefetch`` of a hint."""
    PIN = "kvtier.pin"
    """``kvtier.pin@1.0``: its payload is a range of ``retain`` without a priority."""
    DEMOTE = "kvtier.demote"
    """``kvtier.demote@1.0``: its payload is the field ``demote`` of a hint."""
    RELEASE = "kvtier.release"
    """``kvtier.release@1.0``: the session has ended. Its payload is empty."""
    UNKNOWN = "unknown"
    """Ignored, since kvtier does not know it."""
    INVALID = "invalid"
    """Ignored, since it can't be understood."""


class KvHints(NamedTuple):
    """Content of an orchestrator's envelope.

    hint: of its valid actions together; one that contradicts those before it is invalid. actions:
        kind of each action.
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
    fields: dict[str, object] = {}
    hint: Hint | None = None
    kinds: list[HintAction] = []
    for action in actions[:MAX_ACTIONS]:
        kind, stated = _parse_action(action)
        if stated is not None:
            try:
                hint = parse_hint(merged := _merged(fields, stated))
                fields = merged
            except ValueError:
                kind = HintAction.INVALID
        kinds.append(kind)
    return KvHints(hint, tuple(kinds))


def _parse_action(action: object) -> tuple[HintAction, dict[str, object] | None]:
    """Return the kind of an action, and the fields of a hint that it states."""
    name, version = _entry(action, "action_type"), _entry(action, "action_version")
    payload = _entry(action, "payload")
    if not isinstance(name, str) or not isinstance(version, str) or not isinstance(payload, dict):
        return HintAction.INVALID, None
    if version.partition(".")[0] != "1":
        return HintAction.UNKNOWN, None
    match name:
        case HintAction.FETCH:
            is_valid = isinstance(payload.get("block_hashes"), list)
            return HintAction.FETCH if is_valid else HintAction.INVALID, None
        case HintAction.HINT:
            return HintAction.HINT, payload
        case HintAction.PIN:
            return HintAction.PIN, {"retain": [{**payload, "priority": HIGHEST_PRIORITY}]}
        case HintAction.RELEASE:
            return HintAction.RELEASE, {**payload, "ended": True}
        case HintAction.PREFETCH | HintAction.DEMOTE:
            return HintAction(name), {name.removeprefix("kvtier."): payload}
    return HintAction.UNKNOWN, None


def _merged(fields: dict[str, object], stated: dict[str, object]) -> dict[str, object]:
    """Return the fields of two hints together; of a field that both have, the later one."""
    ranges = [given for given in (fields.get("retain"), stated.get("retain")) if given]
    merged = {**fields, **stated}
    if len(ranges) == 2 and all(isinstance(given, list) for given in ranges):
        merged["retain"] = [*ranges[0], *ranges[1]]  # type: ignore[misc]
    return merged


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
