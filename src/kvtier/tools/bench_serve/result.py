"""Result of ``kvtier bench serve``: its targets, and one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.types import DISK
from kvtier.serve.engine import EngineInfo
from kvtier.tools.bench_serve.accuracy import AccuracyResult
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.bench_serve.overhead import OverheadResult
from kvtier.tools.bench_serve.overlap import Case, OverlapResult
from kvtier.tools.bench_serve.sample import Sample
from kvtier.tools.bench_serve.slow_disk import SlowDiskResult
from kvtier.tools.bench_serve.store import StoreResult
from kvtier.tools.bench_serve.ttft import FIELDS, TtftResult
from kvtier.tools.report.machine import Fact
from kvtier.tools.report.stats import exactly
from kvtier.tools.report.target import Target

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
    """Results of all experiments; None for an experiment that did not run.

    Attributes:
        options: options of the run.
        info: facts about the model.
        machine: facts about the machine.
        command: command to repeat the run.
        started: local time, ISO 8601.
        wall_s: duration of the whole run.
        text: source of the prompts.
        sample: sample of the model's text.
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
        """Targets that this run measured, in the order of the experiments."""
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
        """Whether all logits were equal, and all damage was noticed."""
        accurate = self.accuracy is None or self.accuracy.share == 1.0
        accurate = accurate and (self.overlap is None or self.overlap.all_same)
        accurate = accurate and (self.store is None or self.store.all_same)
        return accurate and (self.ttft is None or self.ttft.num_same == self.ttft.num_warm)

    def as_json(self) -> Json:
        """Return the JSON object of this benchmark."""
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
            "accuracy": _json(self.accuracy),
            **(dict.fromkeys(FIELDS) if self.ttft is None else self.ttft.as_json()),
            "overhead": _json(self.overhead),
            "slow_disk": _json(self.slow_disk),
            "overlap": _json(self.overlap),
            "store": _json(self.store),
            "rows": [row for found in self._found for row in found.rows_json()],
            "targets": [target.as_json() for target in self.targets],
        }

    @property
    def _found(self) -> list[_Experiment]:
        """Results of the experiments that ran, in order."""
        every = (self.accuracy, self.ttft, self.overhead, self.slow_disk, self.overlap, self.store)
        return [found for found in every if found is not None]


class _Experiment(Protocol):
    """Result of one experiment: its figures, and its rows, for the JSON object."""

    def as_json(self) -> Json: ...
    def rows_json(self) -> list[Json]: ...


def _json(found: _Experiment | None) -> Json | None:
    return None if found is None else found.as_json()


class _Sized(Protocol):
    """Sizes of an experiment."""

    @property
    def full_size(self) -> bool: ...
    @property
    def full_length(self) -> bool: ...


def _deviation(result: _Sized) -> str:
    if not result.full_length:
        return SHORTER
    return "" if result.full_size else FEWER


def _accuracy_target(result: AccuracyResult, attention: str) -> Target:
    """Return the accuracy target. It has no interval: one differing prompt fails it at any size."""
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
