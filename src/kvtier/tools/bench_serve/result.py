"""Result of ``kvtier bench serve``: its targets, and one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.serve.engine import EngineInfo
from kvtier.tools.bench_serve.accuracy import AccuracyResult
from kvtier.tools.bench_serve.engines import Sample
from kvtier.tools.bench_serve.experiment import ExperimentResult, Json
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.bench_serve.overhead import OverheadResult
from kvtier.tools.bench_serve.overlap import OverlapResult
from kvtier.tools.bench_serve.slow_disk import SlowDiskResult
from kvtier.tools.bench_serve.store import StoreResult
from kvtier.tools.bench_serve.ttft import FIELDS, TtftResult
from kvtier.tools.report.machine import Fact
from kvtier.tools.report.target import Target


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
    def found(self) -> list[ExperimentResult]:
        """Results of the experiments that ran, in order."""
        every = (self.accuracy, self.ttft, self.overhead, self.slow_disk, self.overlap, self.store)
        return [result for result in every if result is not None]

    @property
    def targets(self) -> list[Target]:
        """Targets that this run measured, in the order of the experiments."""
        return [target for result in self.found for target in result.targets()]

    @property
    def correct(self) -> bool:
        """Whether all logits were equal, and all damage was noticed."""
        return all(result.all_same for result in self.found)

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
            "rows": [row for result in self.found for row in result.rows_json()],
            "targets": [target.as_json() for target in self.targets],
        }


def _json(found: ExperimentResult | None) -> Json | None:
    return None if found is None else found.as_json()
