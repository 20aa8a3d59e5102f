"""Loading while computing: how much of a load is hidden behind the prefill that follows it?

One long prompt is served in rounds. In each round it is computed cold, served from the device, and
twice from the host: once with the prefill following the load layer by layer, and once with the
prefill waiting for the whole load, in alternating order. The load's own time is measured without an
overlapping prefill. A first round, which does not count, warms up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

import numpy as np

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS
from kvtier.core.types import DEVICE, HOST, LoadPolicy
from kvtier.observe import specs
from kvtier.serve.engine import Engine, EngineInfo
from kvtier.tools.bench_serve.engines import Setting, clear_tiers, open_engine, settle
from kvtier.tools.bench_serve.experiment import ExperimentResult, RequestRunner
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import Estimate, Floats, estimate, rounded
from kvtier.tools.report.target import Target

FULL_TOKENS = 16384
FULL_PARAMETERS = 6_500_000_000
"""Parameters of the model for which the targets are defined: the shape of Llama-3-8B."""
ACCELERATOR_CHUNK_TOKENS = 1024
"""Prefill chunk on an accelerator. Chunks of 128 tokens would leave most of it idle. Larger chunks
cost more than they gain, since one whole chunk of a cached prompt is computed again."""
ACCELERATOR_BLOCK_SIZE = 256
"""Tokens of a block there: the driver takes 1 us per copy, and submits no compute meanwhile."""
CPU_TOKENS = 3500
MAX_TOKENS = 2
WANTED = {"G2": 0.80, "G3": 0.08}
SMALLER = "at a smaller size than the target's"


class Case(StrEnum):
    """Source of the prompt."""

    COLD = "cold"
    DEVICE = "device"
    FOLLOWED = "host, layer by layer"
    AWAITED = "host, whole load first"


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One request.

    Attributes:
        turn: number of the round.
        case: source of the prompt.
        ttft_ms: time to first token.
        load_ms: duration of its copies to the device.
        same_logits: whether the logits equal the first cold run's, bit for bit; None for that run.
    """

    turn: int
    case: Case
    ttft_ms: float
    load_ms: float
    same_logits: bool | None


@dataclass(frozen=True)
class OverlapResult(ExperimentResult):
    """All rows, round by round.

    load_bytes: bytes per load. at_full_size: whether device and model are those for which the
    targets are defined.
    """

    name = "overlap"
    rows: tuple[OverlapRow, ...]
    chunk_tokens: int
    load_bytes: int
    at_full_size: bool

    def ttft_ms(self, case: Case) -> float:
        """Return the median time to first token."""
        return median(row.ttft_ms for row in self.rows if row.case is case)

    @property
    def load_ms(self) -> float:
        """Median duration of a load without an overlapping prefill."""
        return median(row.load_ms for row in self.rows if row.case is Case.AWAITED)

    def hidden(self, case: Case) -> Estimate:
        """Return the share of a load's duration that the prefill hides.

        At 1, requests from the host are as fast as those from the device.
        """

        def figure(rounds: Floats) -> Floats:
            warm, device, load = np.moveaxis(np.median(rounds, axis=-2), -1, 0)
            return np.asarray(1 - (warm - device) / load)

        load_ms = [row.load_ms for row in self._rows_of(Case.AWAITED)]
        return self._estimate(figure, self._times_ms(case), self._times_ms(Case.DEVICE), load_ms)

    @property
    def share_of_cold(self) -> Estimate:
        """Time to first token from the host, layer by layer, as a share of a cold run's."""

        def figure(rounds: Floats) -> Floats:
            warm, cold = np.moveaxis(np.median(rounds, axis=-2), -1, 0)
            return np.asarray(warm / cold)

        return self._estimate(figure, self._times_ms(Case.FOLLOWED), self._times_ms(Case.COLD))

    def _rows_of(self, case: Case) -> list[OverlapRow]:
        return sorted((row for row in self.rows if row.case is case), key=lambda row: row.turn)

    def _times_ms(self, case: Case) -> list[float]:
        return [row.ttft_ms for row in self._rows_of(case)]

    @staticmethod
    def _estimate(figure: Callable[[Floats], Floats], *by_round: list[float]) -> Estimate:
        return estimate(list(zip(*by_round, strict=True)), figure)

    @property
    def num_rounds(self) -> int:
        return sum(row.case is Case.COLD for row in self.rows)

    @property
    def full_size(self) -> bool:
        """Whether device, model and prompt are those for which the targets are defined."""
        return self.at_full_size and self.prompt_tokens >= FULL_TOKENS

    @property
    def all_same(self) -> bool:
        """Whether all logits equal the first cold run's."""
        return all(row.same_logits is not False for row in self.rows)

    def as_json(self) -> Mapping[str, object]:
        return {
            "ttft_ms": {case.name.lower(): round(self.ttft_ms(case), 3) for case in Case},
            "load_ms": round(self.load_ms, 3),
            "load_bytes": self.load_bytes,
            "hidden": {
                case.name.lower(): rounded(self.hidden(case).value)
                for case in (Case.FOLLOWED, Case.AWAITED)
            },
            "share_of_cold": rounded(self.share_of_cold.value),
            "prompt_tokens": self.prompt_tokens,
            "chunk_tokens": self.chunk_tokens,
            "rounds": self.num_rounds,
        }

    def _row_json(self, row: OverlapRow) -> dict[str, Any]:
        fields = super()._row_json(row)
        return {"round": fields.pop("turn"), **fields, "case": row.case.name.lower()}

    def targets(self) -> list[Target]:
        meanings = {
            "G2": "share of a load from the host that the prefill hides",
            "G3": "time to first token of a long prompt from the host, by that of a cold run",
        }
        found = {"G2": self.hidden(Case.FOLLOWED), "G3": self.share_of_cold}
        return [
            Target(
                target_id,
                meaning,
                found[target_id],
                WANTED[target_id],
                at_least=target_id == "G2",
                deviation="" if self.full_size else SMALLER,
                comparable=self.full_size,
            )
            for target_id, meaning in meanings.items()
        ]


def measure_overlap(setting: Setting, progress: Progress) -> OverlapResult:
    """Run the rounds on one engine, one request at a time."""
    info, options = setting.info, setting.options
    is_cpu = info.device == "cpu"
    if not is_cpu and (options.block_size, options.chunk_tokens) == (BLOCK_SIZE, CHUNK_TOKENS):
        size, chunk = ACCELERATOR_BLOCK_SIZE, ACCELERATOR_CHUNK_TOKENS
        options = replace(options, block_size=size, chunk_tokens=chunk)
        info = replace(info, bytes_per_block=info.bytes_per_block * size // info.block_size)
    chunk = options.chunk_tokens
    length = options.overlap_tokens or (CPU_TOKENS if is_cpu else FULL_TOKENS)
    reused = options.reused_tokens(length)
    if reused < chunk:
        raise BenchError(f"a prompt of {length} tokens has no whole chunk of {chunk} to load")
    (prompt,) = setting.prompts(1, length)
    room, cached = options.blocks(length + MAX_TOKENS), options.blocks(length)
    progress.begin("Loading while computing", len(Case) * (options.overlap_rounds + 1))
    with open_engine(options, info, 2 * room, 2 * cached, load_policy=LoadPolicy.ALWAYS) as engine:
        bench = _Rounds(engine, prompt, reused, progress)
        for turn in range(options.overlap_rounds + 1):
            bench.run(turn)
    return OverlapResult(
        rows=tuple(row for row in bench.rows if row.turn > 0),
        prompt_tokens=length,
        chunk_tokens=chunk,
        load_bytes=options.blocks(reused) * info.bytes_per_block,
        at_full_size=_is_full(info),
    )


def _is_full(info: EngineInfo) -> bool:
    return info.device != "cpu" and info.num_parameters >= FULL_PARAMETERS


class _Rounds:
    """RequestRunner the prompt in every case, and collects the rows."""

    def __init__(
        self, engine: Engine, prompt: Prompt, reused_tokens: int, progress: Progress
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._reused_tokens = reused_tokens
        self._requests = RequestRunner(progress, MAX_TOKENS)
        self._digest: bytes | None = None
        self.rows: list[OverlapRow] = []

    def run(self, turn: int) -> None:
        """Run one round, under a salt of its own, so that it begins cold."""
        clear_tiers(self._engine, DEVICE, HOST)
        gc.collect()
        self._ask(turn, Case.COLD, {})
        settle(self._engine)
        self._ask(turn, Case.DEVICE, {DEVICE: self._reused_tokens})
        both = (Case.FOLLOWED, Case.AWAITED)
        for case in both if turn % 2 else both[::-1]:
            clear_tiers(self._engine, DEVICE)
            self._ask(turn, case, {HOST: self._reused_tokens})

    def _ask(self, turn: int, case: Case, hits: Mapping[str, int]) -> None:
        engine = self._engine
        engine.call(lambda: engine.follow_loads(case is not Case.AWAITED))
        load_before_s = self._load_s()
        answer = self._requests.ask(engine, self._prompt, salt=f"round {turn}")
        if answer.hit_tokens != hits:
            raise BenchError(
                f"round {turn}, {case}: reused {dict(answer.hit_tokens)} instead of "
                f"{dict(hits)}; is the machine short of memory?"
            )
        same = None if self._digest is None else answer.digest == self._digest
        self._digest = self._digest or answer.digest
        load_ms = (self._load_s() - load_before_s) * 1000
        self.rows.append(OverlapRow(turn, case, answer.ttft_ms, load_ms, same))

    def _load_s(self) -> float:
        """Return the seconds of all copies from the host to the device so far."""
        registry = self._engine.cache.metrics.registry
        labels = {"src": HOST, "dst": DEVICE}
        return registry.get_sample_value(f"{specs.COPY_SECONDS.name}_sum", labels) or 0.0
