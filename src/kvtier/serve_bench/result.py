"""What a run of ``kvtier bench serve`` found, as values and as the JSON object that it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier.engine import EngineInfo
from kvtier.serve_bench.accuracy import TIERS, AccuracyResult
from kvtier.serve_bench.machine import Fact
from kvtier.serve_bench.options import ServeOptions
from kvtier.serve_bench.overhead import OverheadResult
from kvtier.serve_bench.overlap import Case, OverlapResult
from kvtier.serve_bench.sample import Sample
from kvtier.serve_bench.slow_disk import SlowDiskResult
from kvtier.serve_bench.stats import Estimate, Summary, exactly, rounded
from kvtier.serve_bench.store import StoreResult
from kvtier.serve_bench.tamper import Damage
from kvtier.serve_bench.target import Target
from kvtier.serve_bench.ttft import COLD, WARM, TtftResult
from kvtier.types import DEVICE, DISK, HOST

Json = Mapping[str, object]

T1_TARGET = 0.95
T1_DISK_TARGET = 0.93
T2_TARGET = 0.01
T3_P50_TARGET = 0.03
T3_P99_TARGET = 0.10
G2_TARGET = 0.80
G3_TARGET = 0.08

SMALLER = "at a smaller size than the target's"
FEWER = "from fewer runs than the target's"
SHORTER = "with shorter prompts than the target's"
FEWER_OR_SHORTER = "with fewer or shorter prompts than the target's"
OTHER_MIX = "with another mix of tiers than the target's"


@dataclass(frozen=True, slots=True)
class ServeResult:
    """Everything that was found; None for an experiment that did not run.

    command: what to type to get the same. started: local time, ISO 8601. wall_s: of all of it.
    text: where the prompts came from. sample: what the model writes.
    """

    options: ServeOptions
    info: EngineInfo
    machine: Mapping[str, Fact]
    command: str
    started: str
    wall_s: float
    text: str
    accuracy: AccuracyResult | None
    ttft: TtftResult | None
    overhead: OverheadResult | None
    sample: Sample | None = None
    slow_disk: SlowDiskResult | None = None
    overlap: OverlapResult | None = None
    store: StoreResult | None = None

    @property
    def targets(self) -> list[Target]:
        """The targets that this run measured, in the order of the experiments."""
        found = []
        if self.accuracy is not None:
            found.append(_accuracy_target(self.accuracy, self.info.attention))
        if self.ttft is not None:
            found += _ttft_targets(self.ttft)
        if self.overhead is not None:
            found.append(
                Target(
                    "T2",
                    "time or throughput lost when nothing can be reused",
                    self.overhead.loss,
                    T2_TARGET,
                    at_least=False,
                    deviation=_deviation(self.overhead),
                    comparable=self.overhead.full_length,
                )
            )
        if self.slow_disk is not None:
            found += _slow_disk_targets(self.slow_disk)
        if self.overlap is not None:
            found += _overlap_targets(self.overlap)
        return found

    @property
    def correct(self) -> bool:
        """Whether every comparison of logits came out as promised."""
        accurate = self.accuracy is None or self.accuracy.share == 1.0
        accurate = accurate and (self.overlap is None or self.overlap.all_same)
        accurate = accurate and (self.store is None or self.store.all_same)
        return accurate and (self.ttft is None or self.ttft.num_same == self.ttft.num_warm)

    def as_json(self) -> Json:
        """The one JSON object of this benchmark."""
        options, info = self.options, self.info
        return {
            "benchmark": "serve",
            "command": self.command,
            "started": self.started,
            "wall_s": round(self.wall_s, 1),
            "quick": options.quick,
            "machine": dict(self.machine),
            "model": {
                "name": info.model_name,
                "attention": info.attention,
                "num_parameters": info.num_parameters,
                "device": info.device,
                "dtype": info.dtype,
                "block_size": info.block_size,
                "chunk_tokens": info.chunk_tokens,
                "bytes_per_block": info.bytes_per_block,
            },
            "text": self.text,
            "accuracy": _accuracy_json(self.accuracy),
            **_ttft_json(self.ttft),
            "overhead": _overhead_json(self.overhead),
            "slow_disk": _slow_disk_json(self.slow_disk),
            "overlap": None if self.overlap is None else self.overlap.as_json(),
            "store": _store_json(self.store),
            "rows": self._rows(),
            "targets": [target.as_json() for target in self.targets],
        }

    def _rows(self) -> list[Json]:
        rows: list[Json] = []
        if self.accuracy is not None:
            rows += [
                {
                    "experiment": "accuracy",
                    "prompt": row.prompt,
                    "tier": row.tier,
                    "reused_all": row.reused,
                    "equal": row.equal,
                    "max_difference": row.max_difference,
                    "noticed": {damage.value: seen for damage, seen in row.noticed.items()},
                }
                for row in self.accuracy.rows
            ]
        if self.ttft is not None:
            rows += [
                {
                    "experiment": "ttft",
                    "pass": row.turn,
                    "order": row.order,
                    "prompt": row.prompt,
                    "served_from": row.served_from,
                    "hit_tokens": dict(row.hit_tokens),
                    "ttft_ms": round(row.ttft_ms, 3),
                    "same_logits": row.same_logits,
                }
                for row in self.ttft.rows
            ]
        if self.overhead is not None:
            rows += [
                {
                    "experiment": "overhead",
                    "pair": row.pair,
                    "ttft_ms": {"on": round(row.on.ttft_ms, 3), "off": round(row.off.ttft_ms, 3)},
                    "tokens_per_s": {
                        "on": round(row.on.tokens_per_s, 1),
                        "off": round(row.off.tokens_per_s, 1),
                    },
                    "cpu_s": {"on": round(row.on.cpu_s, 3), "off": round(row.off.cpu_s, 3)},
                }
                for row in self.overhead.rows
            ]
        if self.slow_disk is not None:
            rows += [
                {
                    "experiment": "slow-disk",
                    "prompt": row.prompt,
                    "ttft_ms": round(row.ttft_ms, 3),
                    "cold_ms": round(row.cold_ms, 3),
                    "reused_tokens": row.reused_tokens,
                }
                for row in self.slow_disk.rows
            ]
        if self.overlap is not None:
            rows += self.overlap.rows_json()
        if self.store is not None:
            rows += [
                {
                    "experiment": "store",
                    "prompt": row.prompt,
                    "cold_ms": round(row.cold_ms, 3),
                    "ttft_ms": round(row.ttft_ms, 3),
                    "hit_tokens": row.hit_tokens,
                    "same_logits": row.same_logits,
                }
                for row in self.store.rows
            ]
        return rows


class _Sized(Protocol):
    """What an experiment says of its size."""

    @property
    def full_size(self) -> bool: ...
    @property
    def full_length(self) -> bool: ...


def _deviation(result: _Sized) -> str:
    if not result.full_length:
        return SHORTER
    return "" if result.full_size else FEWER


def _accuracy_target(result: AccuracyResult, attention: str) -> Target:
    """Not a sample of anything: one prompt that differs is enough, at any size."""
    return Target(
        "C2" if attention == "latent" else "C1",
        "share of prompts with logits equal bit for bit and all damage noticed",
        exactly(result.share),
        1.0,
        at_least=True,
        deviation="" if result.full_size else FEWER_OR_SHORTER,
        comparable=result.full_size or result.share < 1,
    )


def _ttft_targets(result: TtftResult) -> list[Target]:
    other_mix = "" if result.usual_mix else OTHER_MIX
    found = [
        Target(
            "T1",
            "mean time to first token saved in the second pass",
            result.reduction,
            T1_TARGET,
            at_least=True,
            deviation=_deviation(result) or other_mix,
            comparable=result.full_length and result.usual_mix,
        )
    ]
    from_disk = result.reduction_from(DISK)
    if from_disk is not None:
        found.append(
            Target(
                "T1",
                "mean time to first token saved after a restart, from disk",
                from_disk,
                T1_DISK_TARGET,
                at_least=True,
                deviation=_deviation(result),
                comparable=result.full_length,
            )
        )
    return found


def _slow_disk_targets(result: SlowDiskResult) -> list[Target]:
    return [
        Target(
            "T3",
            f"{which} time to first token lost over a disk slower than computing",
            loss,
            wanted,
            at_least=False,
            deviation=_deviation(result),
            comparable=result.full_length,
        )
        for which, loss, wanted in (
            ("median", result.p50_loss, T3_P50_TARGET),
            ("p99", result.p99_loss, T3_P99_TARGET),
        )
    ]


def _overlap_targets(result: OverlapResult) -> list[Target]:
    deviation = "" if result.full_size else SMALLER
    return [
        Target(
            "G2",
            "share of a load from the host that the prefill hides",
            result.hidden(Case.FOLLOWED),
            G2_TARGET,
            at_least=True,
            deviation=deviation,
            comparable=result.full_size,
        ),
        Target(
            "G3",
            "time to first token of a long prompt from the host, by that of a cold run",
            result.share_of_cold,
            G3_TARGET,
            at_least=False,
            deviation=deviation,
            comparable=result.full_size,
        ),
    ]


def _accuracy_json(result: AccuracyResult | None) -> Json | None:
    if result is None:
        return None
    return {
        "prompts": result.num_prompts,
        "equal": result.num_equal(),
        "control_noticed": result.num_noticed(),
        "by_tier": {
            tier: {
                "equal": result.num_equal(tier),
                "control_noticed": result.num_noticed(tier),
                "damage": {kind.value: result.num_noticed(tier, damage=kind) for kind in Damage},
            }
            for tier in TIERS
        },
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.reused_tokens,
        "steps": result.steps,
    }


def _ttft_json(result: TtftResult | None) -> dict[str, object]:
    if result is None:
        return {
            "ttft_ms": None,
            "reduction": None,
            "hit_tokens": None,
            "second_pass": None,
            "restart": None,
            "same_logits": None,
        }
    return {
        "ttft_ms": {name: _summary_json(result.summary(name)) for name in (COLD, *WARM)},
        "reduction": {
            "mean": rounded(result.reduction.value),
            **{tier: _value(result.reduction_from(tier)) for tier in WARM},
        },
        "hit_tokens": {tier: result.hit_tokens(tier) for tier in WARM},
        "second_pass": {
            "prompts": result.num_prompts,
            "prompt_tokens": result.prompt_tokens,
            "served_from": {name: len(result.times_ms(2, name)) for name in (DEVICE, HOST, COLD)},
        },
        "restart": {
            "served_from": {name: len(result.times_ms(3, name)) for name in (*WARM, COLD)},
        },
        "same_logits": {"equal": result.num_same, "of": result.num_warm},
    }


def _overhead_json(result: OverheadResult | None) -> Json | None:
    if result is None:
        return None
    return {
        "ttft_ratio": rounded(result.ttft_ratio.value),
        "throughput_ratio": rounded(result.throughput_ratio.value),
        "num_pairs": len(result.rows),
        "cpu_ratio": rounded(result.cpu_ratio.value),
        "interval_95": {
            "ttft_ratio": result.ttft_ratio.interval_json(),
            "throughput_ratio": result.throughput_ratio.interval_json(),
            "cpu_ratio": result.cpu_ratio.interval_json(),
        },
        "prompt_tokens": result.prompt_tokens,
    }


def _slow_disk_json(result: SlowDiskResult | None) -> Json | None:
    if result is None:
        return None
    return {
        "ttft_ms": {"slow_disk": result.warm.as_json(), "cold": result.cold.as_json()},
        "p50_ratio": rounded(1 + result.p50_loss.value),
        "p99_ratio": rounded(1 + result.p99_loss.value) if result.p99_loss.is_bounded else None,
        "bytes_per_s": result.bytes_per_s,
        "prompt_bytes": result.prompt_bytes,
        "load_s": rounded(result.load_s),
        "prompt_tokens": result.prompt_tokens,
    }


def _store_json(result: StoreResult | None) -> Json | None:
    if result is None:
        return None
    return {
        "where": result.where,
        "prompts": len(result.rows),
        "hits": len(result.hits),
        "hit_tokens": result.hit_tokens,
        "prompt_tokens": result.prompt_tokens,
        "ttft_ms": {"cold": result.cold.as_json(), "store": _summary_json(result.warm)},
        "reduction": _value(result.saved),
        "bytes_read": result.num_bytes,
        "lookups": result.num_lookups,
        "lookup_ms": rounded(result.lookup_ms, 3),
        "same_logits": sum(row.same_logits for row in result.rows),
    }


def _summary_json(summary: Summary | None) -> Json | None:
    return None if summary is None else summary.as_json()


def _value(found: Estimate | None) -> float | None:
    return None if found is None else rounded(found.value)
