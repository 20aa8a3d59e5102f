"""Time to first token: a cold pass, then the same prompts again from the tiers.

The device pool has room for about 35 % of the prompts, the host tier for all. The device tier is
LRU, so after the first pass the newest prompts are on the device. The second pass requests the
newest prompts first, from the device. When it loads the older ones from the host, the prompts that
they evict have already been served. Then the engine is closed and another one opened over the same
disk, which serves the third pass. The tier that served a request is read from its completion, never
assumed.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.serve.engine import Engine
from kvtier.tools.bench_serve.engines import (
    Setting,
    clear_tiers,
    open_engine,
    scratch_disk,
    settle,
)
from kvtier.tools.bench_serve.experiment import ExperimentResult, RequestRunner
from kvtier.tools.bench_serve.options import FULL_TTFT_PROMPTS
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import (
    Estimate,
    Summary,
    mean_saved,
    rounded,
    summarize,
    summary_json,
    value_json,
)
from kvtier.tools.report.target import Target

WARM = (DEVICE, HOST, DISK)
"""Tiers of reused blocks."""
COLD = "cold"
"""Source of a request without reuse: everything was computed."""
MAX_TOKENS = 4
T1_TARGET = 0.95
T1_DISK_TARGET = 0.93
OTHER_MIX = "with another mix of tiers than the target's"
DEVICE_SHARE_WANTED = (0.30, 0.40)
"""Share of requests from the device for which the target is defined."""
FIELDS = ("ttft_ms", "reduction", "hit_tokens", "second_pass", "restart", "same_logits")
"""Fields of this experiment in the benchmark's JSON."""


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One request.

    Attributes:
        turn: the pass: 1, 2, or 3 after the restart.
        order: position in the pass.
        prompt: number of the prompt.
        served_from: the tier of most reused tokens.
        hit_tokens: reused tokens by tier.
        ttft_ms: time to first token.
        same_logits: whether the logits equal the first pass's, bit for bit; None in the first pass.
    """

    turn: int
    order: int
    prompt: int
    served_from: str
    hit_tokens: Mapping[str, int]
    ttft_ms: float
    same_logits: bool | None


@dataclass(frozen=True)
class TtftResult(ExperimentResult):
    """All rows, cold pass first, each pass in the order of its requests."""

    name = "ttft"
    rows: tuple[TtftRow, ...]
    device_prompts: int

    def times_ms(self, turn: int, served_from: str | None = None) -> list[float]:
        """Return the times to first token of a pass, of all its requests or those from one tier."""
        return [
            row.ttft_ms
            for row in self.rows
            if row.turn == turn and served_from in (None, row.served_from)
        ]

    def summary(self, served_from: str) -> Summary | None:
        """Return the summary of ``times_from``; None if there are no times."""
        return summarize(self.times_from(served_from))

    def times_from(self, served_from: str) -> list[float]:
        """Return the times to first token of a source: the cold pass, or requests from a tier."""
        if served_from == COLD:
            return self.times_ms(1)
        return self.times_ms(_turn_of(served_from), served_from)

    def whole_pass(self, turn: int) -> Summary:
        """Return the summary of all requests of a pass."""
        summary = summarize(self.times_ms(turn))
        assert summary is not None, "a pass has at least two requests"
        return summary

    @property
    def reduction(self) -> Estimate:
        """1 - mean TTFT of the second pass / mean of the cold pass."""
        return self._reduction(2, None)

    def reduction_from(self, tier: str) -> Estimate | None:
        """Return the reduction for prompts that ``tier`` served, against their own cold times.

        None if it served no prompt.
        """
        turn = _turn_of(tier)
        return self._reduction(turn, tier) if self.times_ms(turn, tier) else None

    def _reduction(self, turn: int, tier: str | None) -> Estimate:
        cold = {row.prompt: row.ttft_ms for row in self.rows if row.turn == 1}
        pairs = [
            (row.ttft_ms, cold[row.prompt])
            for row in self.rows
            if row.turn == turn and tier in (None, row.served_from)
        ]
        return mean_saved(pairs)

    def hit_tokens(self, tier: str) -> int:
        """Return the tokens that the later passes reused from ``tier``."""
        return sum(row.hit_tokens.get(tier, 0) for row in self.rows if row.turn > 1)

    @property
    def num_prompts(self) -> int:
        return len(self.times_ms(2))

    @property
    def device_share(self) -> float:
        """Share of the second pass that was served from the device."""
        return len(self.times_ms(2, DEVICE)) / self.num_prompts

    @property
    def num_warm(self) -> int:
        """RequestRunner of the passes after the first."""
        return sum(row.turn > 1 for row in self.rows)

    @property
    def num_same(self) -> int:
        """RequestRunner of the later passes whose logits equal the first pass's."""
        return sum(row.same_logits is True for row in self.rows)

    @property
    def usual_mix(self) -> bool:
        """Whether the mix of tiers is the one for which the target is defined."""
        low, high = DEVICE_SHARE_WANTED
        return low <= self.device_share <= high and not self.times_ms(2, COLD)

    @property
    def full_size(self) -> bool:
        """Whether there are as many prompts as the target requires."""
        return self.num_prompts >= FULL_TTFT_PROMPTS

    @property
    def all_same(self) -> bool:
        return self.num_same == self.num_warm

    def targets(self) -> list[Target]:
        meaning = "mean time to first token saved"
        other_mix = "" if self.usual_mix else OTHER_MIX
        found = [
            self._target(
                "T1",
                f"{meaning} in the second pass",
                self.reduction,
                T1_TARGET,
                at_least=True,
                otherwise=other_mix,
            )
        ]
        if (from_disk := self.reduction_from(DISK)) is not None:
            meaning += " after a restart, from disk"
            found.append(self._target("T1", meaning, from_disk, T1_DISK_TARGET, at_least=True))
        return found

    def as_json(self) -> Mapping[str, object]:
        """Return the fields of this experiment, by the names in ``FIELDS``."""
        fields = (
            {name: summary_json(self.summary(name)) for name in (COLD, *WARM)},
            {
                "mean": rounded(self.reduction.value),
                **{tier: value_json(self.reduction_from(tier)) for tier in WARM},
            },
            {tier: self.hit_tokens(tier) for tier in WARM},
            {
                "prompts": self.num_prompts,
                "prompt_tokens": self.prompt_tokens,
                "served_from": {name: len(self.times_ms(2, name)) for name in (DEVICE, HOST, COLD)},
            },
            {"served_from": {name: len(self.times_ms(3, name)) for name in (*WARM, COLD)}},
            {"equal": self.num_same, "of": self.num_warm},
        )
        return dict(zip(FIELDS, fields, strict=True))

    def _row_json(self, row: TtftRow) -> dict[str, Any]:
        fields = super()._row_json(row)
        return {"pass": fields.pop("turn"), **fields}


def _turn_of(tier: str) -> int:
    """Return the pass that is served from ``tier``."""
    return 3 if tier == DISK else 2


def measure_ttft(setting: Setting, progress: Progress) -> TtftResult:
    """Run two passes on a fresh engine, and the last one on another; one request at a time."""
    options = setting.options
    count, length = options.ttft_prompts, options.ttft_tokens
    prompts = setting.prompts(count + 1, length)  # the last one is for warming up
    room = options.blocks(length + MAX_TOKENS)
    cached = options.blocks(options.cached_tokens(length))
    on_device = max(1, round(options.device_share * count))
    device_blocks = (on_device - 1) * cached + room
    progress.begin("Time to first token", 3 * count + 4)
    host_blocks = (count + 1) * cached
    warm_up, bench = prompts.pop(), _Passes(progress)
    with scratch_disk(options) as disk:
        sizes = (device_blocks, host_blocks, disk, host_blocks)
        with open_engine(options, setting.info, *sizes) as engine:
            bench.warm_up(engine, warm_up)
            for number, prompt in enumerate(prompts):
                bench.ask(engine, 1, number, number, prompt)
            settle(engine)
            gc.collect()
            for order, number in enumerate(reversed(range(count))):
                bench.ask(engine, 2, order, number, prompts[number])
        with open_engine(options, setting.info, *sizes) as engine:
            bench.warm_up(engine, warm_up)
            for number, prompt in enumerate(prompts):
                bench.ask(engine, 3, number, number, prompt)
    return TtftResult(tuple(bench.rows), length, on_device)


class _Passes:
    """Runs one request after the other, and collects the rows."""

    def __init__(self, progress: Progress) -> None:
        self._requests = RequestRunner(progress, MAX_TOKENS)
        self._digests: dict[int, bytes] = {}
        self.rows: list[TtftRow] = []

    def warm_up(self, engine: Engine, prompt: Prompt) -> None:
        """Run every path once: prefill, decoding, store, load. Leaves device and host empty."""
        for _ in range(2):
            self._requests.ask(engine, prompt)
            clear_tiers(engine, DEVICE)
        clear_tiers(engine, DEVICE, HOST)

    def ask(self, engine: Engine, turn: int, order: int, number: int, prompt: Prompt) -> None:
        """Serve prompt ``number`` once and keep the row."""
        answer = self._requests.ask(engine, prompt)
        first = self._digests.setdefault(number, answer.digest)
        self.rows.append(
            TtftRow(
                turn=turn,
                order=order,
                prompt=number,
                served_from=served_from(answer.hit_tokens),
                hit_tokens={tier: answer.hit_tokens.get(tier, 0) for tier in WARM},
                ttft_ms=answer.ttft_ms,
                same_logits=None if turn == 1 else first == answer.digest,
            )
        )


def served_from(hit_tokens: Mapping[str, int]) -> str:
    """Return the tier of most reused tokens; ``COLD`` if none were reused."""
    tier = max(hit_tokens, key=lambda name: hit_tokens[name], default=COLD)
    return tier if hit_tokens.get(tier, 0) > 0 else COLD
