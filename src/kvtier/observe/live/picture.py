"""Current state of a cache, as values for the page, a terminal or a script.

None means unknown: the engine does not report the value, or there are too few measurements. It must
not be shown as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class TierShare:
    """Share of requested tokens found in a tier.

    recent: in the busy minute. ever: since the server's start.
    """

    tier: str
    recent: float | None
    ever: float | None


@dataclass(frozen=True, slots=True)
class Tier:
    """State of one tier.

    Attributes:
        name: name of the tier.
        used, slots: blocks in use, and capacity in blocks.
        fill: share in use, 0 to 1.
        evicted_per_s: blocks evicted per second, in the last minute.
        turnover_s: time in which the whole tier would be evicted at that rate.
        evicted: blocks evicted since the server's start.
        returned: share of them that was requested again.
        return_s: median time until that request.
        damaged: blocks that could not be returned intact, since the server's start.
        damaged_recently: the same in the last minute.
        audited, different: hits that were audited, and those of them that were different, since the
            server's start.
        unwritten: blocks whose queued write was dropped.
        left_alone: 0 in use, 1 being retried, 2 paused after errors, 3 in use with a slab whose
            data file was truncated.
        used_bytes, capacity_bytes: ``used`` and ``slots`` in bytes.
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
    audited: float = 0.0
    different: float = 0.0
    unwritten: float = 0.0
    left_alone: int | None = None
    used_bytes: float | None = None
    capacity_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Transfers from one tier to another.

    Attributes:
        src, dst: the tiers.
        bytes_per_s: rate in the last seconds.
        num_bytes: bytes since the server's start.
        in_flight: number of copies in flight.
        queued_s: queueing delay of a copy that begins now; None if copies are refused, or unknown.
        is_refused: whether copies are refused.
        failed: blocks that failed since the server's start.
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
    """Expected and actual durations of loads or prefill, in the busy minute.

    Attributes:
        what: source tier of the loads, or "prefill".
        expected_s: sum of expected durations.
        took_s: sum of actual durations.
        ratio: actual over expected.
        num: number of loads; None if unknown.
    """

    what: str
    expected_s: float | None
    took_s: float | None
    ratio: float | None
    num: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """Prompt tokens that were not computed, and the seconds saved, less the cost of loading.

    tokens_per_s, seconds_per_s: in the busy minute.
    """

    tokens: float | None
    seconds: float | None
    tokens_per_s: float | None
    seconds_per_s: float | None


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the engine.

    Attributes:
        running, waiting: number of requests now.
        per_s: requests ended per second, in the last minute.
        prompt_tokens_per_s: prompt tokens per second, in the last minute.
        ttft_s, ttft_p95_s: time to first token, mean and 95th percentile, in the busy minute.
    """

    running: float | None
    waiting: float | None
    per_s: float | None
    prompt_tokens_per_s: float | None
    ttft_s: float | None
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts about the server.

    models: names of the served models. version: kvtier's version; "" if unknown. uptime_s: None if
    the engine does not report it.
    """

    models: tuple[str, ...] = ()
    version: str = ""
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """One engine that is attached to a node.

    Attributes:
        name, tenant: its title, or else the name that its processes share; its tenant's name.
        processes: number of its processes.
        slots: slots that it reads or writes.
        waiting: its requests that wait for storage or for another engine.
        failures, pauses: calls without an answer in time, and times that its breaker opened, as far
            as it has reported them.
        pauses_recently: the same in the last minute.
    """

    name: str
    tenant: str
    processes: float
    slots: float
    waiting: float
    failures: float
    pauses: float
    pauses_recently: float | None


@dataclass(frozen=True, slots=True)
class NodeTenant:
    """Use of a node by one tenant.

    Attributes:
        name: name of the tenant.
        engines: number of its engines.
        memory_bytes, pinned_bytes: host memory in its segments, and in those with pinned blocks.
        floor_bytes, ceiling_bytes: its quota.
        used_bytes: bytes of its blocks by tier.
        slab_bytes: disk of its slabs, used or not.
        disk_floor_bytes, disk_ceiling_bytes: its quota on disk; None for no ceiling.
        found: share of the blocks that its engines looked up and that were there, in the busy
            minute.
    """

    name: str
    engines: float
    memory_bytes: float
    pinned_bytes: float
    floor_bytes: float
    ceiling_bytes: float
    used_bytes: Mapping[str, float]
    slab_bytes: float
    disk_floor_bytes: float
    disk_ceiling_bytes: float | None
    found: float | None


@dataclass(frozen=True, slots=True)
class NodeRoomUse:
    """Use of a node by one room: one model's blocks of one tenant.

    used_bytes: bytes of its blocks by tier.
    """

    name: str
    tenant: str
    block_bytes: float
    segments: float
    used_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePicture:
    """Engines, tenants, rooms and memory of a node.

    Attributes:
        memory_bytes, free_bytes, segment_bytes: host memory, what of it belongs to no room, and the
            size of a segment.
        lookups_per_s: look-ups by engines, in the last minute.
        lookup_s, lookup_p95_s, late_lookup_s: time to their answer in the busy minute: mean, 95th
            and 99th percentile.
        engines, tenants, rooms: who uses it.
    """

    memory_bytes: float
    free_bytes: float
    segment_bytes: float
    lookups_per_s: float | None
    lookup_s: float | None
    lookup_p95_s: float | None
    late_lookup_s: float | None
    engines: tuple[NodeEngine, ...]
    tenants: tuple[NodeTenant, ...]
    rooms: tuple[NodeRoomUse, ...]


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """Answer to a question of an operator. level: "good", "plain" or "bad"."""

    question: str
    text: str
    level: str


@dataclass(frozen=True, slots=True)
class Picture:
    """State of the cache of an engine, or of a node, at one moment.

    The *busy minute* is the minute before the last request. Figures of requests come from it, and
    therefore do not change while nothing is requested.

    Attributes:
        engine: name of the engine; "kvtier node" for a node.
        age_s: seconds for which the server has been watched.
        window_s: actual length of the busy minute.
        quiet_s: seconds since its end; None if no request was seen.
        has_restarted: whether the server restarted while watched.
        has_cache: whether the engine reports kvtier metrics.
        hits: hit share of each tier.
        hit_share: hit share of all tiers.
        saved: prefill saved by the cache.
        tiers, flows: tiers, and transfers between them.
        loaded, recomputed: cached blocks that were loaded, or recomputed all the same, since the
            server's start.
        loaded_recently, recomputed_recently: the same in the busy minute.
        guesses: accuracy of the planner's estimates.
        late_loads: loads given up at their deadline, since the server's start.
        late_loads_recently: the same in the last minute.
        requests: requests of the engine.
        server: facts about the server.
        node: what only a node has; None for an engine.
        answers: answers to an operator's questions.
    """

    engine: str
    age_s: float
    window_s: float
    quiet_s: float | None
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
    node: NodePicture | None = None
    answers: tuple[PageAnswer, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the picture for ``json.dumps``, with None for infinity and NaN."""
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
