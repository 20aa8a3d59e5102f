"""Make a picture from readings: rates over the last minute, and totals since the server's start."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, isinf

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.observe import specs
from kvtier.observe.live.dialects import NODE, Dialect, dialect_of
from kvtier.observe.live.differences import grown, mean, quantile, rate, ratio
from kvtier.observe.live.make_node import make_node, tiers_of_node
from kvtier.observe.live.picture import (
    Flow,
    Guess,
    Picture,
    Requests,
    Saved,
    ServerInfo,
    Tier,
    TierShare,
)
from kvtier.observe.live.questions import answer
from kvtier.observe.live.reading import Reading

LEAST_ASKED = {"tokens": 2000.0, "blocks": 100.0}
"""Least requested tokens or blocks for which a hit share is shown."""
LEAST_LOADS = 5
"""Least number of copies for which the error of the estimates is shown."""
LEAST_PREFILL_S = 0.5
"""Least predicted prefill time for which the error of the estimates is shown."""
LEAST_GONE = 30
"""Least number of sampled evicted blocks for which the share that returned is shown."""
ORDER = (DEVICE, HOST, DISK)
COMPARED = ("equal", "within_tolerance", "different")
"""Outcomes of audits that took place."""


def make_picture(
    first: Reading,
    before: Reading,
    now: Reading,
    age_s: float,
    has_restarted: bool,
    busy: tuple[Reading, Reading] | None,
) -> Picture:
    """Make a picture from readings.

    Args:
        first: the oldest reading of the last minute; may be ``now``.
        before: the oldest reading of the last seconds; may be ``now``.
        now: the latest reading.
        age_s: seconds for which the server has been watched.
        has_restarted: whether it restarted meanwhile.
        busy: the first and last reading of the busy minute, see ``Picture``; None if there is none.
    """
    dialect = dialect_of(now)
    quiet_s = None if busy is None else now.at_s - busy[1].at_s
    busy = busy or (first, now)
    hits, whole = _hits(busy, now, dialect)
    picture = Picture(
        dialect.engine if dialect else "unknown",
        age_s,
        busy[1].at_s - busy[0].at_s,
        quiet_s,
        has_restarted,
        any(name.startswith(specs.PREFIX) for name in now.values),
        hits,
        whole,
        _saved(busy, now),
        _tiers(first, now, dialect),
        _flows(before, now, dialect),
        now.total(specs.PLANNED_BLOCKS.name, decision="load"),
        now.total(specs.PLANNED_BLOCKS.name, decision="recompute"),
        grown(*busy, specs.PLANNED_BLOCKS.name, decision="load"),
        grown(*busy, specs.PLANNED_BLOCKS.name, decision="recompute"),
        _guesses(*busy),
        now.total(specs.LATE_LOADS.name) or 0.0,
        grown(first, now, specs.LATE_LOADS.name),
        _requests(first, now, busy, dialect),
        ServerInfo(now.models, now.version, _uptime_s(now)),
        make_node(first, now, busy) if dialect is NODE else None,
    )
    if picture.node is not None:
        picture = replace(picture, tiers=tiers_of_node(picture.tiers, now))
    return replace(picture, answers=tuple(answer(picture)))


def _uptime_s(now: Reading) -> float | None:
    uptime_s = now.total(specs.SERVER_UPTIME_SECONDS.name)
    return now.total(specs.NODE_UPTIME_SECONDS.name) if uptime_s is None else uptime_s


def _hits(
    busy: tuple[Reading, Reading], now: Reading, dialect: Dialect | None
) -> tuple[tuple[TierShare, ...], TierShare]:
    if dialect is None:
        return (), TierShare("all", None, None)
    least = LEAST_ASKED["blocks" if dialect.asked.endswith("_blocks_total") else "tokens"]
    asked, ever = grown(*busy, dialect.asked), now.total(dialect.asked)
    given: dict[str, tuple[float | None, float]] = {}
    for source, total in now.by(dialect.given, dialect.source).items():
        tier = dialect.name_of(source)
        if tier is not None:
            recent = grown(busy[0], busy[1], dialect.given, **{dialect.source: source})
            given[tier] = recent, total
    shares = [
        TierShare(tier, ratio(recent, asked, least), ratio(total, ever, least))
        for tier, (recent, total) in sorted(given.items(), key=lambda each: _place(each[0]))
    ]
    found = sum(recent or 0.0 for recent, _ in given.values())
    whole = sum(total for _, total in given.values())
    return tuple(shares), TierShare("all", ratio(found, asked, least), ratio(whole, ever, least))


def _place(tier: str) -> int:
    """Return the sort key of a tier: its position in the ladder, with stores at the end."""
    return ORDER.index(tier) if tier in ORDER else len(ORDER)


def _saved(busy: tuple[Reading, Reading], now: Reading) -> Saved:
    tokens, seconds = specs.SAVED_TOKENS.name, specs.SAVED_SECONDS.name
    return Saved(
        now.total(tokens),
        now.total(seconds),
        rate(*busy, tokens),
        rate(*busy, seconds),
    )


def _tiers(first: Reading, now: Reading, dialect: Dialect | None) -> tuple[Tier, ...]:
    slots = now.by(specs.SLOTS.name, "tier")
    names = sorted({*slots, *now.by(specs.BREAKER_STATE.name, "tier")}, key=_place)
    tiers = [_tier(name, first, now) for name in names]
    if dialect is not None and dialect.device and DEVICE not in names:
        tiers.insert(0, Tier(DEVICE, fill=now.total(dialect.device)))
    return tuple(tiers)


def _tier(name: str, first: Reading, now: Reading) -> Tier:
    slots = now.total(specs.SLOTS.name, tier=name)
    used = now.total(specs.USED_SLOTS.name, tier=name)
    evicted_per_s = rate(first, now, specs.EVICTED_BLOCKS.name, tier=name)
    evicted = now.total(specs.EVICTED_BLOCKS.name, tier=name) or 0.0
    returned, return_s = _returns(name, now, evicted)
    state = now.values.get(specs.BREAKER_STATE.name, {}).get((("tier", name),))
    slot_bytes = now.total(specs.SLOT_BYTES.name, tier=name) or None
    audits = specs.AUDITS.name
    return Tier(
        name,
        used,
        slots,
        used / slots if slots and used is not None else None,
        evicted_per_s,
        slots / evicted_per_s if slots and evicted_per_s else None,
        evicted,
        returned,
        return_s,
        now.total(specs.DAMAGED_BLOCKS.name, tier=name) or 0.0,
        grown(first, now, specs.DAMAGED_BLOCKS.name, tier=name),
        sum(now.total(audits, tier=name, outcome=each) or 0.0 for each in COMPARED),
        now.total(audits, tier=name, outcome=COMPARED[-1]) or 0.0,
        now.total(specs.UNWRITTEN_BLOCKS.name, tier=name) or 0.0,
        int(state) if state in (0, 1, 2, 3) else None,
        used * slot_bytes if slot_bytes and used is not None else None,
        slots * slot_bytes if slot_bytes and slots is not None else None,
    )


def _returns(name: str, now: Reading, evicted: float) -> tuple[float | None, float | None]:
    """Return the share of evicted blocks that were requested again, and the median delay.

    The size of the sample is the number of evicted blocks over the weight of a sampled one.
    """
    returned = now.total(specs.RETURNED_BLOCKS.name, tier=name)
    num_seen = now.total(f"{specs.RETURN_SECONDS.name}_count", tier=name)
    if returned is None or num_seen is None:
        return None, None
    weight = max(1.0, returned / num_seen) if num_seen else 1.0
    if evicted / weight < LEAST_GONE:
        return None, None
    ages = f"{specs.RETURN_SECONDS.name}_bucket"
    median = _median(now, ages, name) if num_seen >= LEAST_GONE else None
    return min(1.0, returned / evicted), median


def _median(now: Reading, name: str, tier: str) -> float | None:
    """Return the upper end of the bucket that contains the median; None if it is unbounded."""
    buckets = sorted(
        (end, value)
        for at, value in now.values.get(name, {}).items()
        if dict(at).get("tier") == tier and (end := _end(dict(at).get("le"))) is not None
    )
    half = buckets[-1][1] / 2 if buckets else 0.0
    end = next((end for end, value in buckets if value >= half > 0), inf)
    return None if isinf(end) else end


def _end(le: str | None) -> float | None:
    """Return a bucket's upper end in seconds; None if ``le`` is missing or invalid."""
    try:
        end = float(le or "")
    except ValueError:
        return None
    return end if end >= 0 else None


def _flows(before: Reading, now: Reading, dialect: Dialect | None) -> tuple[Flow, ...]:
    num_bytes = now.by_route(specs.COPIED_BYTES.name)
    engines = {
        route: name
        for route, name in (dialect.flows.items() if dialect is not None else ())
        if now.has(name) or route not in num_bytes
    }
    num_bytes |= {route: now.total(name) or 0.0 for route, name in engines.items()}
    in_flight = now.by_route(specs.TRANSFERS_IN_FLIGHT.name)
    queued = now.by_route(specs.QUEUED_SECONDS.name)
    failed = now.by_route(specs.FAILED_BLOCKS.name)
    flows = []
    for route in sorted({*num_bytes, *in_flight, *queued}, key=lambda at: tuple(map(_place, at))):
        src, dst = route
        if dialect is NODE and DEVICE in route:
            continue  # its engines copy themselves
        if route in engines:
            bytes_per_s = rate(before, now, engines[route])
        else:
            bytes_per_s = rate(before, now, specs.COPIED_BYTES.name, src=src, dst=dst)
        queued_s = queued.get(route)
        is_refused = queued_s is not None and isinf(queued_s)
        flows.append(
            Flow(
                src,
                dst,
                bytes_per_s,
                num_bytes.get(route, 0.0),
                in_flight.get(route),
                None if is_refused else queued_s,
                is_refused,
                failed.get(route, 0.0),
            )
        )
    return tuple(flows)


def _guesses(first: Reading, now: Reading) -> tuple[Guess, ...]:
    guesses = []
    for src in sorted(now.by(specs.PREDICTED_LOAD_SECONDS.name, "src"), key=_place):
        expected_s = grown(first, now, specs.PREDICTED_LOAD_SECONDS.name, src=src)
        took_s = grown(first, now, specs.ACTUAL_LOAD_SECONDS.name, src=src)
        num = grown(first, now, f"{specs.LOAD_ERROR_RATIO.name}_count", src=src)
        factor = _over(took_s, expected_s) if num and num >= LEAST_LOADS else None
        guesses.append(Guess(src, expected_s, took_s, factor, num))
    if now.total(specs.PREDICTED_PREFILL_SECONDS.name):
        expected_s = grown(first, now, specs.PREDICTED_PREFILL_SECONDS.name)
        took_s = grown(first, now, specs.ACTUAL_PREFILL_SECONDS.name)
        is_told = expected_s is not None and expected_s >= LEAST_PREFILL_S
        factor = _over(took_s, expected_s) if is_told else None
        guesses.append(Guess("prefill", expected_s, took_s, factor, None))
    return tuple(guesses)


def _over(took_s: float | None, expected_s: float | None) -> float | None:
    factor = took_s / expected_s if took_s is not None and expected_s else None
    return factor if factor is not None and isfinite(factor) else None


def _requests(
    first: Reading, now: Reading, busy: tuple[Reading, Reading], dialect: Dialect | None
) -> Requests:
    if dialect is None:
        return Requests(None, None, None, None, None, None)
    return Requests(
        now.total(dialect.running),
        now.total(dialect.waiting),
        rate(first, now, dialect.requests),
        rate(first, now, dialect.prompt_tokens),
        mean(*busy, dialect.ttft),
        quantile(*busy, dialect.ttft, 0.95),
    )
