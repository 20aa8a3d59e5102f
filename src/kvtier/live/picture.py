"""State of a cache now, as values: for a page, a terminal, a script.

None stands for what can't be told: the engine does not say, or there are too few of them. Nobody is
to show 0 in its place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class TierShare:
    """Share of requested tokens. recent: in the last minute. ever: since the server's start."""

    tier: str
    recent: float | None
    ever: float | None


@dataclass(frozen=True, slots=True)
class Tier:
    """State of one tier.

    used, slots: in blocks; used_bytes, capacity_bytes: the same in bytes. fill: 0 to 1.
    evicted_per_s: blocks, in the last minute. turnover_s: until all of it would have left at that
    rate. returned: of the blocks that left since the server began, the share that was wanted again;
    return_s: half of these within. damaged: blocks that it could not give back as they were, since
    the server began; damaged_recently: in the last minute. left_alone: 0 in use, 1 being retried, 2
    paused after errors, 3 in use with a slab that was cut short.
    """

    name: str
    used: float | None = None
    slots: float | None = None
    fill: float | None = None
    evicted_per_s: float | None = None
    turnover_s: float | None = None
    evicted: float = 0.0
    returned: float | None = None
    return_s: float | None = None
    damaged: float = 0.0
    damaged_recently: float | None = None
    unwritten: float = 0.0
    left_alone: int | None = None
    used_bytes: float | None = None
    capacity_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Transfers from one tier to another.

    bytes_per_s: in the last seconds. in_flight: copies. queued_s: until one that begins now has its
    turn; None where none is taken, or nobody tells. num_bytes, failed: since the server began.
    """

    src: str
    dst: str
    bytes_per_s: float | None
    num_bytes: float
    in_flight: float | None
    queued_s: float | None
    is_refused: bool
    failed: float


@dataclass(frozen=True, slots=True)
class Guess:
    """Expected and actual time in the last minute.

    what: a tier that blocks came from, or "prefill". ratio: actual over expected. num: how many of
    them; None if unknown.
    """

    what: str
    expected_s: float | None
    took_s: float | None
    ratio: float | None
    num: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """Prompt tokens that were not computed, and the seconds saved, less the cost of loading.

    Per second: in the last minute.
    """

    tokens: float | None
    seconds: float | None
    tokens_per_s: float | None
    seconds_per_s: float | None


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the engine.

    running, waiting: now.

    per_s, ttft_s: ended, and their mean time to the first token, in the last minute.
    """

    running: float | None
    waiting: float | None
    per_s: float | None
    prompt_tokens_per_s: float | None
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts about the server.

    models: names of the served models.

    version: kvtier's, "" if unknown. uptime_s: None if the engine does not tell it.
    """

    models: tuple[str, ...] = ()
    version: str = ""
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """To a question that people have. level: "good", "plain" or "bad"."""

    question: str
    text: str
    level: str


@dataclass(frozen=True, slots=True)
class Picture:
    """State of an engine's cache at one moment.

    engine: by name.

    age_s: for how long this server has been watched. window_s: what "in the last minute" is, where
    it is less. has_restarted: it began anew since. loaded, recomputed: cached blocks that were to
    be loaded, or computed all the same, since the server began; the same in the last minute.
    late_loads, late_loads_recently: given up at their deadline.
    """

    engine: str
    age_s: float
    window_s: float
    has_restarted: bool
    has_cache: bool
    hits: tuple[TierShare, ...]
    hit_share: TierShare
    saved: Saved
    tiers: tuple[Tier, ...]
    flows: tuple[Flow, ...]
    loaded: float | None
    recomputed: float | None
    loaded_recently: float | None
    recomputed_recently: float | None
    guesses: tuple[Guess, ...]
    late_loads: float
    late_loads_recently: float | None
    requests: Requests
    server: ServerInfo = ServerInfo()
    answers: tuple[PageAnswer, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``: no infinity, no NaN."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
