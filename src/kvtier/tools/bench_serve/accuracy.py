"""Accuracy: reused KV gives the same logits, bit for bit, and a wrong block would be noticed.

For every prompt, one request at a time:

    cold      under another salt, so that it shares nothing: the reference
    donor     another request with the same prefix computes and stores it
    device    the prompt again, its prefix from the device tier: equal to cold?
    host      the prompt again after the device tier was emptied, its prefix from the host: equal?
    disk      the prompt in a new engine over the same disk, its prefix from there: equal?
    control   the last three again, with one block damaged in three ways: different from cold?

Damage on disk is written with a valid checksum; otherwise it would be detected and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.serve.engine import Engine, SamplingParams
from kvtier.tools.bench_serve.engines import (
    Setting,
    clear_tiers,
    open_engine,
    run_one,
    scratch_disk,
    settle,
)
from kvtier.tools.bench_serve.experiment import ExperimentResult
from kvtier.tools.bench_serve.options import FULL_ACCURACY_PROMPTS, BenchError
from kvtier.tools.bench_serve.tamper import Damage, damaged
from kvtier.tools.report.corpus import Prompt, with_other_ending
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import exactly
from kvtier.tools.report.target import Target

TIERS = (DEVICE, HOST, DISK)
FEWER_OR_SHORTER = "with fewer or shorter prompts than the target's"
CONTROL_STEPS = 4
"""Steps of a control run: damage shows in the first logits or never."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One prompt served from one tier.

    Attributes:
        prompt: number of the prompt.
        tier: the tier.
        reused: whether the whole prefix came from that tier.
        equal: whether the logits equal the cold run's in every bit.
        max_difference: largest difference of a logit from the cold run's; 0.0 if equal.
        noticed: per kind of damage, whether the logits differed.
    """

    prompt: int
    tier: str
    reused: bool
    equal: bool
    max_difference: float
    noticed: Mapping[Damage, bool]

    @property
    def passed(self) -> bool:
        """Whether it was served from the tier, and equals the cold run in every bit."""
        return self.reused and self.equal


@dataclass(frozen=True)
class AccuracyResult(ExperimentResult):
    """All rows, one per prompt and tier, and the sizes of the experiment."""

    name = "accuracy"
    rows: tuple[AccuracyRow, ...]
    num_prompts: int
    reused_tokens: int
    steps: int
    attention: str = "full"

    def num_equal(self, *tiers: str) -> int:
        """Return the number of prompts that passed in each of ``tiers`` (by default, all)."""
        return self._count(lambda row: row.passed, tiers)

    def num_noticed(self, *tiers: str, damage: Damage | None = None) -> int:
        """Return the number of prompts whose damage was noticed in each of ``tiers``.

        damage: one kind of damage; by default, every kind must be noticed.
        """
        kinds = tuple(Damage) if damage is None else (damage,)
        return self._count(lambda row: all(row.noticed[kind] for kind in kinds), tiers)

    def _count(self, holds: Callable[[AccuracyRow], bool], tiers: tuple[str, ...]) -> int:
        failed = {
            row.prompt for row in self.rows if row.tier in (tiers or TIERS) and not holds(row)
        }
        return self.num_prompts - len(failed)

    @property
    def share(self) -> float:
        """Share of prompts that passed: the smaller of the two counts."""
        return min(self.num_equal(), self.num_noticed()) / self.num_prompts

    @property
    def full_size(self) -> bool:
        """Whether this is the size for which the target is defined."""
        return self.num_prompts >= FULL_ACCURACY_PROMPTS and self.full_length

    @property
    def all_same(self) -> bool:
        """Whether all logits were equal, and all damage was noticed."""
        return self.share == 1.0

    def targets(self) -> list[Target]:
        """Return the target. It has no interval: one differing prompt fails it at any size."""
        return [
            Target(
                "C2" if self.attention == "latent" else "C1",
                "share of prompts with logits equal bit for bit and all damage noticed",
                exactly(self.share),
                1.0,
                at_least=True,
                deviation="" if self.full_size else FEWER_OR_SHORTER,
                comparable=self.full_size or self.share < 1,
            )
        ]

    def as_json(self) -> Mapping[str, object]:
        """Return the counts, in total and by tier."""
        return {
            "prompts": self.num_prompts,
            "equal": self.num_equal(),
            "control_noticed": self.num_noticed(),
            "by_tier": {
                tier: {
                    "equal": self.num_equal(tier),
                    "control_noticed": self.num_noticed(tier),
                    "damage": {kind.value: self.num_noticed(tier, damage=kind) for kind in Damage},
                }
                for tier in TIERS
            },
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "steps": self.steps,
        }

    def _row_json(self, row: AccuracyRow) -> dict[str, Any]:
        return {
            "prompt": row.prompt,
            "tier": row.tier,
            "reused_all": row.reused,
            "equal": row.equal,
            "max_difference": row.max_difference,
            "noticed": {damage.value: seen for damage, seen in row.noticed.items()},
        }


def measure_accuracy(setting: Setting, progress: Progress) -> AccuracyResult:
    """Run the experiment on a fresh engine, and the disk part on another over the same disk."""
    options = setting.options
    length = options.accuracy_tokens
    room = options.blocks(length + options.steps)
    # One prompt more than requested: the last one's negative control needs another's block.
    prompts = setting.prompts(options.accuracy_prompts + 1, length)
    runs_per_prompt = 3 + len(TIERS) * (1 + len(Damage))
    progress.begin("Accuracy", options.accuracy_prompts * runs_per_prompt)
    rows: list[AccuracyRow] = []
    bench = _Accuracy(options.steps, options.reused_tokens(length), progress)
    with scratch_disk(options) as disk:
        sizes = (3 * room, 3 * room, disk, 3 * room * len(prompts), LoadPolicy.ALWAYS)
        with open_engine(options, setting.info, *sizes) as engine:
            for number, (prompt, other) in enumerate(pairwise(prompts)):
                bench.prepare(engine, number, prompt, other)
                for tier in (DEVICE, HOST):
                    seed = options.seed + number
                    rows.append(bench.measure(engine, tier, number, prompt, other, seed))
        with open_engine(options, setting.info, *sizes) as engine:
            for number, (prompt, other) in enumerate(pairwise(prompts)):
                seed = options.seed + number
                rows.append(bench.measure(engine, DISK, number, prompt, other, seed))
    reused_tokens = options.reused_tokens(length)
    return AccuracyResult(
        tuple(rows),
        length,
        options.accuracy_prompts,
        reused_tokens,
        options.steps,
        setting.info.attention,
    )


class _Accuracy:
    """Runs of all prompts, with the reference of each."""

    def __init__(self, steps: int, reused_tokens: int, progress: Progress) -> None:
        self._steps = steps
        self._reused_tokens = reused_tokens
        self._progress = progress
        self._cold: list[Logits] = []

    def prepare(self, engine: Engine, number: int, prompt: Prompt, other: Prompt) -> None:
        """Compute the reference; then let other requests compute the prefix to be reused.

        other: a prompt that shares nothing with this one.
        """
        cold, hits = self._run(engine, prompt, self._steps, salt="cold")
        if sum(hits.values()):
            raise BenchError(f"the cold run of prompt {number} reused {dict(hits)} tokens")
        self._cold.append(cold)
        clear_tiers(engine, DEVICE, HOST)
        self._ask(engine, with_other_ending(prompt, self._reused_tokens, other))
        self._progress.advance()
        self._meet_stranger(engine, other)
        self._progress.advance()

    def measure(
        self, engine: Engine, tier: str, number: int, prompt: Prompt, other: Prompt, seed: int
    ) -> AccuracyRow:
        """Serve the prompt from ``tier``, then again with damage in it, and return the row."""
        cold = self._cold[number]
        self._expose(engine, tier)
        warm, hits = self._run(engine, prompt, self._steps)
        if tier == DISK:
            self._meet_stranger(engine, other)
        noticed = {
            damage: self._notices(engine, tier, damage, prompt, other, cold, seed)
            for damage in Damage
        }
        return AccuracyRow(
            prompt=number,
            tier=tier,
            reused=hits.get(tier, 0) == sum(hits.values()) == self._reused_tokens,
            equal=bits_equal(cold, warm),
            max_difference=float(np.max(np.abs(cold - warm))),
            noticed=noticed,
        )

    def _run(
        self, engine: Engine, prompt: Prompt, steps: int, salt: str = ""
    ) -> tuple[Logits, Mapping[str, int]]:
        params = SamplingParams(max_tokens=steps, ignore_eos=True, keep_logits=True)
        completion = run_one(engine, prompt, params, salt)
        self._progress.advance()
        assert completion.logits is not None
        return completion.logits, completion.hit_tokens

    def _ask(self, engine: Engine, prompt: Prompt) -> None:
        run_one(engine, prompt, SamplingParams(max_tokens=1, ignore_eos=True))

    def _meet_stranger(self, engine: Engine, other: Prompt) -> None:
        """Compute blocks of another prompt, which one kind of damage needs."""
        self._ask(engine, other[: 2 * engine.info.chunk_tokens + 1])

    def _expose(self, engine: Engine, tier: str) -> None:
        """Make ``tier`` the fastest one that has the prompt."""
        settle(engine)
        clear_tiers(engine, *TIERS[: TIERS.index(tier)])

    def _notices(
        self,
        engine: Engine,
        tier: str,
        damage: Damage,
        prompt: Prompt,
        other: Prompt,
        cold: Logits,
        seed: int,
    ) -> bool:
        """Whether a run with a damaged block in ``tier`` differs from the cold one."""
        self._expose(engine, tier)
        steps = min(self._steps, CONTROL_STEPS)
        with damaged(engine, tier, damage, prompt, other, seed):
            logits, hits = self._run(engine, prompt, steps)
            self._expose(engine, tier)
        if hits.get(tier, 0) != self._reused_tokens:
            raise BenchError(f"the control run reused {dict(hits)} tokens, not all from {tier}")
        return not bits_equal(cold[:steps], logits)


def bits_equal(one: Logits, another: Logits) -> bool:
    """Whether two arrays have the same shape and the same bits: stricter than ``==``."""
    return one.shape == another.shape and one.tobytes() == another.tobytes()
