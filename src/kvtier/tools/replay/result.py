"""Result of a replay, as values and as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.tools.replay.assumptions import Assumption, Machine
from kvtier.tools.replay.evidence import Evidence
from kvtier.tools.replay.savings import Savings
from kvtier.tools.replay.sizing import Point, SizeChoice
from kvtier.tools.report.stats import Estimate, rounded

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts about a trace.

    Attributes:
        names: names of the files.
        num_requests: requests.
        num_references: blocks of all requests.
        num_unique: distinct blocks.
        block_tokens: tokens per block.
        window_s: time from the first request to the last.
        tokens: tokens of all prompts.
        computing_s: accelerator seconds to compute them all.
        notes: assumptions made when reading the files.
    """

    names: tuple[str, ...]
    num_requests: int
    num_references: int
    num_unique: int
    block_tokens: int
    window_s: float
    tokens: int
    computing_s: float
    notes: tuple[str, ...]

    @property
    def ceiling(self) -> float:
        """Hit ratio of an unlimited cache."""
        return 1 - self.num_unique / self.num_references


@dataclass(frozen=True, slots=True)
class HitPoint:
    """One size under one policy.

    hit_ratio: share of blocks found. time_ratio: share of the time to compute all prompts that is
    saved, without the time for loading.
    """

    num_bytes: int
    num_blocks: int
    hit_ratio: float
    time_ratio: float

    def as_json(self) -> Json:
        return {
            "bytes": self.num_bytes,
            "blocks": self.num_blocks,
            "hit_ratio": rounded(self.hit_ratio, 5),
            "time_ratio": rounded(self.time_ratio, 5),
        }


@dataclass(frozen=True, slots=True)
class Setup:
    """Tiers of some sizes, and their savings compared to no cache."""

    name: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    savings: Savings


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        command: command to repeat the replay.
        facts: facts about the trace.
        evidence: how much the trace can tell.
        machine, assumptions: assumptions of the replay.
        policy: policy for which the sizes were evaluated.
        curves: hits by policy.
        ceiling: hits of an unlimited cache.
        host: sizes of host memory without a disk.
        disk: sizes of a disk below the recommended host memory.
        choice: recommended sizes; None if the trace is too weak.
        setups: combinations of tiers that are compared.
        gained: accelerator seconds per hour that the recommended tiers save.
    """

    command: str
    facts: TraceFacts
    evidence: Evidence
    machine: Machine
    assumptions: tuple[Assumption, ...]
    policy: str
    curves: Mapping[str, tuple[HitPoint, ...]]
    ceiling: HitPoint
    host: tuple[Point, ...]
    disk: tuple[Point, ...]
    choice: SizeChoice | None
    setups: tuple[Setup, ...]
    gained: Estimate | None

    @property
    def best_host(self) -> Point | None:
        """Recommended host memory; None for none."""
        return None if self.choice is None else self.choice.host

    @property
    def best_disk(self) -> Point | None:
        return None if self.choice is None else self.choice.disk

    def as_json(self, recommendation: str) -> Json:
        """Return the result as one JSON object. recommendation: in words."""
        facts, evidence = self.facts, self.evidence
        return {
            "benchmark": "replay",
            "command": self.command,
            "trace": {
                "files": list(facts.names),
                "requests": facts.num_requests,
                "references": facts.num_references,
                "unique_blocks": facts.num_unique,
                "block_tokens": facts.block_tokens,
                "window_s": rounded(facts.window_s, 3),
                "prompt_tokens": facts.tokens,
                "computing_s": rounded(facts.computing_s, 3),
                "reusing_requests": evidence.num_reuses,
                "reuse_age_s": {
                    "p50": rounded(evidence.age_p50_s, 3),
                    "p90": rounded(evidence.age_p90_s, 3),
                },
                "notes": list(facts.notes),
            },
            "assumptions": [
                {"name": assumption.name, "value": assumption.value, "source": assumption.source}
                for assumption in self.assumptions
            ],
            "policy": self.policy,
            "hits": {
                name: [point.as_json() for point in points] for name, points in self.curves.items()
            },
            "infinite": self.ceiling.as_json(),
            "host": [_point_json(point) for point in self.host],
            "disk": [_point_json(point) for point in self.disk],
            "setups": [
                {
                    "name": setup.name,
                    "device_bytes": setup.device_bytes,
                    "host_bytes": setup.host_bytes,
                    "disk_bytes": setup.disk_bytes,
                    "tokens": dict(
                        zip(("device", "host", "disk"), setup.savings.by_tier, strict=True)
                    ),
                    "saved_s": rounded(setup.savings.total_s, 3),
                }
                for setup in self.setups
            ],
            "recommendation": {
                "host_bytes": _bytes(self.best_host),
                "disk_bytes": _bytes(self.best_disk),
                "net_per_hour": None if self.choice is None else rounded(self.choice.net, 6),
                "seconds_per_hour": None if self.gained is None else rounded(self.gained.value, 3),
                "interval_95": None if self.gained is None else self.gained.interval_json(3),
                "text": recommendation,
            },
        }


def _bytes(point: Point | None) -> int | None:
    return None if point is None else point.num_bytes


def _point_json(point: Point) -> Json:
    return {
        "bytes": point.num_bytes,
        "blocks": point.num_blocks,
        "hit_ratio": rounded(point.hit_ratio, 5),
        "tokens_not_computed_per_s": rounded(point.tokens_per_s, 3),
        "seconds_saved_per_hour": rounded(point.seconds_per_hour, 3),
        "saved_per_hour": rounded(point.saved, 6),
        "price_per_hour": rounded(point.price, 6),
        "gain_per_gib_month": rounded(point.gain_per_gib, 6),
        "price_per_gib_month": rounded(point.price_per_gib, 6),
        "written_bytes_per_day": rounded(point.written_per_day, 0),
        "drive_writes_per_day": rounded(point.drive_writes, 4),
        "supported": point.supported,
    }
