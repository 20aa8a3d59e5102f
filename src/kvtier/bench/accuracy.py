"""Accuracy: reused KV gives the same logits, bit for bit, and a wrong block would be noticed.

For every prompt, one request at a time:

    cold      both tiers empty: the reference
    donor     both tiers empty: another request with the same beginning computes and stores it
    device    the prompt again, its beginning from the device tier: equal to cold?
    host      the device tier emptied, the prompt again, its beginning from the host tier: equal?
    control   the last two again, with one block damaged in three ways: different from cold?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.bench.corpus import Prompt, with_other_ending
from kvtier.bench.engines import Setting, clear_tiers, open_engine, run_one, settle
from kvtier.bench.options import FULL_ACCURACY_PROMPTS, FULL_PROMPT_TOKENS, BenchError
from kvtier.bench.progress import Progress
from kvtier.bench.tamper import Damage, damaged
from kvtier.engine import Engine, SamplingParams
from kvtier.types import DEVICE, HOST

TIERS = (DEVICE, HOST)
CONTROL_STEPS = 4
"""Steps of a control run: damage shows in the first logits or never."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One prompt served from one tier.

    reused: whether all of the prompt's beginning came from that tier.
    max_difference: largest distance of a logit from the cold run's, 0.0 when equal.
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
        """Served from the tier, and equal to the cold run in every bit."""
        return self.reused and self.equal


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """All rows, two per prompt, and what they were measured at."""

    rows: tuple[AccuracyRow, ...]
    num_prompts: int
    prompt_tokens: int
    reused_tokens: int
    steps: int

    def num_equal(self, *tiers: str) -> int:
        """Prompts that passed in each of ``tiers`` (all, where none is named)."""
        return self._count(lambda row: row.passed, tiers)

    def num_noticed(self, *tiers: str, damage: Damage | None = None) -> int:
        """Prompts whose damage was noticed in each of ``tiers``; of every kind, or of one."""
        kinds = tuple(Damage) if damage is None else (damage,)
        return self._count(lambda row: all(row.noticed[kind] for kind in kinds), tiers)

    def _count(self, holds: Callable[[AccuracyRow], bool], tiers: tuple[str, ...]) -> int:
        failed = {
            row.prompt for row in self.rows if row.tier in (tiers or TIERS) and not holds(row)
        }
        return self.num_prompts - len(failed)

    @property
    def share(self) -> float:
        """Share of the prompts for which all holds: the smallest of the counts."""
        return min(self.num_equal(), self.num_noticed()) / self.num_prompts

    @property
    def full_size(self) -> bool:
        """Whether this is the size that the target is defined at."""
        return (
            self.num_prompts >= FULL_ACCURACY_PROMPTS and self.prompt_tokens >= FULL_PROMPT_TOKENS
        )


def num_steps(num_prompts: int) -> int:
    """Runs in the whole experiment, for the progress bar."""
    return num_prompts * (3 + len(TIERS) * (1 + len(Damage)))


def measure_accuracy(setting: Setting, progress: Progress) -> AccuracyResult:
    """Run the experiment on a fresh engine."""
    options = setting.options
    length = options.accuracy_tokens
    room = options.blocks(length + options.steps)
    # One prompt more than asked for: the last one's negative control needs another's block.
    prompts = setting.prompts(options.accuracy_prompts + 1, length)
    progress.begin("Accuracy", num_steps(options.accuracy_prompts))
    rows: list[AccuracyRow] = []
    with open_engine(options, setting.info, 3 * room, 3 * room) as engine:
        bench = _Accuracy(engine, options.steps, options.reused_tokens(length), progress)
        for number, (prompt, other) in enumerate(pairwise(prompts)):
            rows += bench.measure(number, prompt, other, options.seed + number)
    return AccuracyResult(
        tuple(rows), options.accuracy_prompts, length, options.reused_tokens(length), options.steps
    )


class _Accuracy:
    """The runs of one prompt."""

    def __init__(self, engine: Engine, steps: int, reused_tokens: int, progress: Progress) -> None:
        self._engine = engine
        self._steps = steps
        self._reused_tokens = reused_tokens
        self._progress = progress

    def measure(self, number: int, prompt: Prompt, other: Prompt, seed: int) -> list[AccuracyRow]:
        """Both tiers' rows. other: a prompt that shares nothing with this one."""
        clear_tiers(self._engine)
        cold, hits = self._run(prompt, self._steps)
        if sum(hits.values()):
            raise BenchError(f"the cold run of prompt {number} reused {dict(hits)} tokens")
        self._fill(prompt, other)
        rows = []
        for tier in TIERS:
            self._expose(tier)
            warm, hits = self._run(prompt, self._steps)
            noticed = {
                damage: self._notices(tier, damage, prompt, other, cold, seed) for damage in Damage
            }
            rows.append(
                AccuracyRow(
                    prompt=number,
                    tier=tier,
                    reused=hits.get(tier, 0) == sum(hits.values()) == self._reused_tokens,
                    equal=bits_equal(cold, warm),
                    max_difference=float(np.max(np.abs(cold - warm))),
                    noticed=noticed,
                )
            )
        return rows

    def _run(self, prompt: Prompt, steps: int) -> tuple[Logits, Mapping[str, int]]:
        params = SamplingParams(max_tokens=steps, ignore_eos=True, keep_logits=True)
        completion = run_one(self._engine, prompt, params)
        self._progress.advance()
        assert completion.logits is not None
        return completion.logits, completion.hit_tokens

    def _fill(self, prompt: Prompt, other: Prompt) -> None:
        """Empty the tiers; have other requests compute what is to be reused, and a stranger."""
        clear_tiers(self._engine)
        once = SamplingParams(max_tokens=1, ignore_eos=True)
        run_one(self._engine, with_other_ending(prompt, self._reused_tokens, other), once)
        self._progress.advance()
        run_one(self._engine, other[: 2 * self._engine.info.chunk_tokens + 1], once)
        self._progress.advance()

    def _expose(self, tier: str) -> None:
        """Make ``tier`` the fastest one that has the prompt."""
        if tier == DEVICE:
            settle(self._engine)
        else:
            clear_tiers(self._engine, DEVICE)

    def _notices(
        self, tier: str, damage: Damage, prompt: Prompt, other: Prompt, cold: Logits, seed: int
    ) -> bool:
        """Whether a run with a damaged block in ``tier`` differs from the cold one."""
        self._expose(tier)
        steps = min(self._steps, CONTROL_STEPS)
        with damaged(self._engine, tier, damage, prompt, other, seed):
            logits, hits = self._run(prompt, steps)
            settle(self._engine)
        if hits.get(tier, 0) != self._reused_tokens:
            raise BenchError(f"the control run reused {dict(hits)} tokens, not all from {tier}")
        return not bits_equal(cold[:steps], logits)


def bits_equal(one: Logits, another: Logits) -> bool:
    """Whether two arrays have the same shape and the same bits: stricter than ``==``."""
    return one.shape == another.shape and one.tobytes() == another.tobytes()
