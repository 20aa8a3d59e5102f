"""Alerts on lasting problems. A single failed block, which is recomputed, raises none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvtier.tools.dashboard.queries import QueryScope

_EACH = QueryScope(kept=("job", "instance"))


def _over(window: str) -> QueryScope:
    return replace(_EACH, window=window)


class Severity(StrEnum):
    WARNING = "warning"
    """To be checked within a day."""
    INFO = "info"
    """To be considered when capacity is planned."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: name of the alert.
        condition: PromQL.
        lasts: time for which the condition must hold.
        severity: see ``Severity``.
        summary, advice: texts, with labels as ``{{ $labels.tier }}``.
    """

    name: str
    condition: str
    lasts: str
    severity: Severity
    summary: str
    advice: str


_WHERE = "{{ $labels.instance }}"
_WAY = "{{ $labels.src }} to {{ $labels.dst }}"
_OTHER_ERRORS = 'status=~"5..",status!="503"'
_TURNED_AWAY = 'status=~"429|503"'


def _share_above(part: str, whole: str, limit: float, at_least: int) -> str:
    """Return a condition on ``part`` as a share of ``whole``, with more than a few requests."""
    return f"({part} / {whole} > {limit}) and {part} >= {at_least}"


def _failing_copies() -> str:
    failed = _over("15m").increase("kvtier_failed_copies_total", "src", "dst")
    done = _over("15m").count("kvtier_copy_seconds", "src", "dst")
    return _share_above(failed, f"({failed} + {done} or {failed})", 0.05, 5)


def _answers(where: str, limit: float) -> str:
    asking = _over("15m")
    some = asking.increase("kvtier_server_requests_total", where=where)
    every = asking.increase("kvtier_server_requests_total")
    return _share_above(some, every, limit, 5)


def _rarely_found() -> str:
    asking = _over("6h")
    found = asking.increase("kvtier_hit_blocks_total")
    every = asking.increase("kvtier_prompt_blocks_total")
    return f"(({found} / {every}) or 0 * {every}) < 0.01 and {every} >= 10000"


def _of_prompts(name: str, limit: float) -> str:
    asking = _over("30m")
    some = asking.increase(name, "tier")
    every = asking.increase("kvtier_prompt_blocks_total")
    matched = f"{some} / on (job, instance) group_left () {every}"
    return f"({matched} > {limit}) and {some} >= 1000"


def _wrong_predictions() -> str:
    asking = _over("30m")
    actual = asking.rate("kvtier_actual_load_seconds_total", "src")
    planned = asking.rate("kvtier_predicted_load_seconds_total", "src")
    enough = asking.count("kvtier_load_error_ratio", "src")
    return f"({actual} / ({planned} > 0) > 2) and {enough} >= 100"


def _come_back() -> str:
    asking = _over("1h")
    returned = asking.increase("kvtier_returned_blocks_total", "tier")
    left = asking.increase("kvtier_evicted_blocks_total", "tier")
    return _share_above(returned, f"({left} > 0)", 0.3, 1000)


def _lost_reads() -> str:
    asking = _over("30m")
    name = "sglang:storage_prefetch_unfulfilled_tokens_total"
    lost = asking.increase(name, where='reason="storage_transfer"')
    found = asking.increase("sglang:storage_prefetch_hit_tokens_total")
    return _share_above(lost, f"({found} > 0)", 0.05, 1000)


def _impatient() -> str:
    asking = _over("30m")
    some = asking.increase("vllm:kvtier_impatient_requests_total")
    every = asking.increase("vllm:request_success_total")
    return _share_above(some, f"({every} > 0)", 0.2, 20)


def _engines_pause() -> str:
    return _over("15m").grown("kvtier_node_engine_pauses_total", "tenant", "engine") + " >= 3"


def _late_lookups() -> str:
    return f"({_over('15m').quantile(0.99, 'kvtier_node_lookup_seconds')}) > 0.005"


def _below_floor() -> str:
    """Return a condition on a tenant that has less than its floor while others have more."""
    held = _EACH.level("kvtier_node_tenant_bytes", "tenant")
    floor = _EACH.level("kvtier_node_floor_bytes", "tenant")
    wanting = f"{_over('30m').increase('kvtier_node_lookup_blocks_total', 'tenant')} > 1000"
    free = _EACH.level("kvtier_node_free_bytes")
    return (
        f"({held} < {floor}) and ({wanting}) "
        f"and on (job, instance) ({free} < {_EACH.level('kvtier_node_segment_bytes')})"
    )


ALERTS = (
    Alert(
        "KvtierBlocksDamaged",
        _over("1h").grown("kvtier_damaged_blocks_total", "tier") + " > 0",
        "0m",
        Severity.WARNING,
        f"{_WHERE}: blocks in {{{{ $labels.tier }}}} are damaged",
        "kvtier detected them and recomputed them. For a disk, run kvtier verify on its folder "
        "and check the disk's health.",
    ),
    Alert(
        "KvtierCopiesFail",
        _failing_copies(),
        "10m",
        Severity.WARNING,
        f"{_WHERE}: more than 5 % of the copies from {_WAY} fail",
        "Failed blocks are recomputed, so requests only take longer. The log has the cause: a "
        "full or failing disk, or a store that does not answer.",
    ),
    Alert(
        "KvtierTierLeftAlone",
        _EACH.highest("kvtier_breaker_state", "tier") + " == 2",
        "5m",
        Severity.WARNING,
        f"{_WHERE}: {{{{ $labels.tier }}}} fails and is paused",
        "It is retried automatically. The log has the last error.",
    ),
    Alert(
        "KvtierSlabCutShort",
        _EACH.highest("kvtier_breaker_state", "tier") + " == 3",
        "0m",
        Severity.WARNING,
        f"{_WHERE}: the slab of {{{{ $labels.tier }}}} is shorter than it was",
        "Something cut its data file short while it was in use. Find out what, then restart the "
        "server: the slab gets its length back, and the blocks that were cut off are recomputed.",
    ),
    Alert(
        "KvtierLoadsLate",
        _share_above(
            _over("15m").increase("kvtier_late_loads_total"),
            _over("15m").increase("kvtier_requests_total"),
            0.05,
            5,
        ),
        "10m",
        Severity.WARNING,
        f"{_WHERE}: more than 5 % of the requests abandon a load",
        "A tier is slower than predicted when the loads were planned: other programs may use the "
        "same disk.",
    ),
    Alert(
        "KvtierPredictsBadly",
        _wrong_predictions(),
        "30m",
        Severity.INFO,
        f"{_WHERE}: loads from {{{{ $labels.src }}}} take more than twice the predicted time",
        "The planner adapts to measured times. If it stays behind for this long, the tier's "
        "speed varies: check what else uses it.",
    ),
    Alert(
        "KvtierNoRoom",
        _of_prompts("kvtier_refused_blocks_total", 0.1),
        "30m",
        Severity.INFO,
        f"{_WHERE}: {{{{ $labels.tier }}}} has no free slot for a tenth of the computed blocks",
        "Every slot is held or in flight. Enlarge the tier, or run fewer requests at a time.",
    ),
    Alert(
        "KvtierStorageFallsBehind",
        _of_prompts("kvtier_unwritten_blocks_total", 0.2),
        "30m",
        Severity.INFO,
        f"{_WHERE}: {{{{ $labels.tier }}}} does not store a fifth of the computed blocks",
        "Host memory fills faster than storage writes, or the day's write budget is spent. Use a "
        "larger host tier, a faster disk, or a write policy that stores only blocks that were "
        "used twice.",
    ),
    Alert(
        "KvtierWantedAgain",
        _come_back(),
        "1h",
        Severity.INFO,
        f"{_WHERE}: a third of the blocks evicted from {{{{ $labels.tier }}}} are requested again",
        "The tier is too small for this traffic. kvtier replay computes what a larger one would "
        "save.",
    ),
    Alert(
        "KvtierRarelyFound",
        _rarely_found(),
        "1h",
        Severity.INFO,
        f"{_WHERE}: less than 1 % of the prompt tokens are found in the cache",
        "Either prompts share no prefixes, or something makes prefixes differ: a time or a name "
        "at the start of a system prompt, or a cache_salt per request.",
    ),
    Alert(
        "KvtierServerFails",
        _answers(_OTHER_ERRORS, 0.01),
        "10m",
        Severity.WARNING,
        f"{_WHERE}: more than 1 % of the requests end in an error of the server",
        "The server's log has each error with its request id.",
    ),
    Alert(
        "KvtierServerTurnsAway",
        _answers(_TURNED_AWAY, 0.05),
        "10m",
        Severity.WARNING,
        f"{_WHERE}: more than 5 % of the requests are rejected",
        "The queue is full, or there are too many connections. Add a replica, or limit the rate of "
        "clients in front.",
    ),
    Alert(
        "VllmKvtierBlocksFail",
        _over("15m").increase("vllm:kvtier_failed_chunks_total", "src", "dst") + " >= 10",
        "15m",
        Severity.WARNING,
        f"{_WHERE}: blocks from {_WAY} fail, under vLLM",
        "Failed blocks are recomputed. The log has the cause: a full or failing disk, or a store "
        "that "
        "does not answer.",
    ),
    Alert(
        "VllmKvtierImpatient",
        _impatient(),
        "30m",
        Severity.INFO,
        f"{_WHERE}: a fifth of the requests stop waiting for storage and recompute",
        "Storage is slower than predicted when the loads were planned.",
    ),
    Alert(
        "SglangKvtierReadsFail",
        _lost_reads(),
        "15m",
        Severity.WARNING,
        f"{_WHERE}: more than 5 % of the blocks found in storage can't be read, under SGLang",
        "Failed blocks are recomputed. The log has the cause.",
    ),
    Alert(
        "KvtierNodeEnginesPause",
        _engines_pause(),
        "0m",
        Severity.WARNING,
        f"{_WHERE}: {{{{ $labels.engine }}}} of {{{{ $labels.tenant }}}} computes, since the node "
        "answers late",
        "Its breaker opened three times in 15 minutes. Check whether the node has a core for "
        "itself, and the time of look-ups.",
    ),
    Alert(
        "KvtierNodeLate",
        _late_lookups(),
        "10m",
        Severity.WARNING,
        f"{_WHERE}: one look-up in a hundred takes longer than engines wait for it",
        "Engines compute prompts that the node may have. Give the node a core for itself.",
    ),
    Alert(
        "KvtierNodeBelowFloor",
        _below_floor(),
        "30m",
        Severity.WARNING,
        f"{_WHERE}: tenant {{{{ $labels.tenant }}}} has less memory than its floor, and none is "
        "free",
        "Memory comes back from other tenants as their copies and pins end. kvtier node status "
        "shows which engine holds slots.",
    ),
)
