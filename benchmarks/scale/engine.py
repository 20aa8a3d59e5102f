"""The embedded engine with many sequences.

A decode step, sampling, and the first token of 200 clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Self

import torch

from benchmarks.report.targets import bounds, estimate, judged
from benchmarks.scale.clients import NUM_CLIENTS, Load, first_tokens
from benchmarks.scale.part import Part, Row, ratio_in_turn, timed, timed_in_turn
from kvtier.serve.engine import Completion, Engine, EngineConfig, RequestHandle, SamplingParams
from kvtier.serve.engine.request import Stage
from kvtier.serve.engine.sampling import Sampler, choose
from kvtier.tools.report.stats import Estimate

SIZES = (1, 16, 64, 256)
PROMPT_TOKENS, MAX_TOKENS = 32, 128
NUM_VERIFIED = 4
NUM_VERIFIED_TOKENS = 24
TIE = 1e-3
"""Log probabilities that differ by less can swap by rounding; no token after that is compared."""

VOCAB_SIZE = 131_072
WANTED_STEP, WANTED_FIRST_TOKEN = 3.0, 3.0


def measure(quick: bool) -> Part:
    sizes = SIZES[:2] if quick else SIZES
    many = sizes[1] if quick else 64
    steps = decode_steps(sizes, rounds=6 if quick else 30)
    sampled = sampling((1, 4) if quick else (1, 16), calls=3 if quick else 9)
    loads = asyncio.run(first_tokens(20, 1) if quick else first_tokens(NUM_CLIENTS, 6))
    by_size = {row.num: row for row in steps}
    targets = [
        judged(
            "N7",
            ratio_in_turn(by_size[1], by_size[many]),
            WANTED_STEP,
            at_least=False,
            what=f"decode step, {many} sequences against 1",
        ),
        *(first_token_target(load) for load in loads),
    ]
    return Part([*steps, *sampled, *(load_row(load) for load in loads)], targets)


# -- a decode step ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generating:
    """An engine without a thread whose sequences all decode. The caller makes its steps."""

    engine: Engine
    handles: Sequence[RequestHandle]

    @classmethod
    def of(cls, num_sequences: int) -> Self:
        config = EngineConfig(
            device_capacity=f"{8 + 2 * num_sequences}MiB",
            max_running=num_sequences,
            max_queue=num_sequences,
            prefix_cache=False,
            threads=1,
        )
        engine = Engine(config)
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        handles = [engine.submit(prompt(at), params) for at in range(num_sequences)]
        made = cls(engine, handles)
        made.take_in()
        while not made.all_generate:
            made.step()
        return made

    @property
    def all_generate(self) -> bool:
        running = self.engine._scheduler.running
        return len(running) == len(self.handles) and all(r.stage is Stage.DECODE for r in running)

    def take_in(self) -> None:
        self.engine._take_in(wait=False)

    def step(self) -> None:
        self.engine._scheduler.step()

    def finish(self) -> list[Completion]:
        while self.engine._scheduler.has_requests:
            self.step()
        completions = [handle.result(0) for handle in self.handles]
        self.engine.close()
        return completions


def prompt(number: int) -> list[int]:
    return [5 + (number * 131 + at * at) % 4000 for at in range(PROMPT_TOKENS)]


def decode_steps(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Time steps of engines of each size, in turn."""
    engines = {num: Generating.of(num) for num in sizes}
    seconds = timed_in_turn({num: each.step for num, each in engines.items()}, rounds)
    for engine in engines.values():
        assert engine.all_generate
        verify(engine.finish())
    return [
        Row("decode step", "kvtier", "sequences", num, seconds[num], {"context": PROMPT_TOKENS})
        for num in sizes
    ]


def verify(completions: Sequence[Completion]) -> None:
    """Check that some sequences have the same tokens as when they run alone."""
    engine = Engine(EngineConfig(device_capacity="16MiB", prefix_cache=False, threads=1))
    with engine:
        for at in range(0, len(completions), max(1, len(completions) // NUM_VERIFIED)):
            params = SamplingParams(NUM_VERIFIED_TOKENS, ignore_eos=True, num_logprobs=2)
            alone = engine.submit(prompt(at), params).result(60)
            for token, found in zip(alone.tokens, completions[at].token_ids, strict=False):
                (_, best), (_, second) = token.top_logprobs
                if best - second < TIE:
                    break
                assert found == token.token_id, "another token than alone"


# -- sampling --------------------------------------------------------------------------------------


def sampling(sizes: Sequence[int], calls: int) -> list[Row]:
    """Time top_p sampling from a large vocabulary, and a full sort for comparison."""
    rows = []
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7)
    for num in sizes:
        made = torch.Generator().manual_seed(num)
        logits = 3 * torch.randn(num, VOCAB_SIZE, generator=made)
        tokens = choose(logits, [Sampler(params) for _ in range(num)])
        kept = zip(tokens, nuclei(logits, params), strict=True)
        assert all(token in nucleus.tolist() for token, nucleus in kept)
        samplers = [Sampler(params) for _ in range(num)]
        seconds: dict[str, list[float]] = {"kvtier": [], "sort": []}
        for _ in range(calls):
            seconds["kvtier"] += timed(partial(choose, logits, samplers), 1)
            seconds["sort"] += timed(partial(nuclei, logits, params), 1)
        rows += [
            Row("top_p of 131,072", contestant, "sequences", num, found)
            for contestant, found in seconds.items()
        ]
    return rows


def nuclei(logits: torch.Tensor, params: SamplingParams) -> list[torch.Tensor]:
    """Return the nuclei by a full sort, each with one more token to allow for rounding."""
    probabilities = (logits / params.temperature).softmax(-1)
    rows = [row.sort(descending=True) for row in probabilities]
    return [
        row.indices[: int((row.values.double().cumsum(-1) < params.top_p).sum()) + 2]
        for row in rows
    ]


# -- the first token -------------------------------------------------------------------------------


def load_row(load: Load) -> Row:
    more: dict[str, object] = {
        "p50_s": round(median(each.p50 for each in load.rounds), 3),
        "p99_s": round(median(each.p99 for each in load.rounds), 3),
        "rounds": len(load.rounds),
        "wall": True,
    }
    seconds = [second for found in load.rounds for second in found.seconds]
    return Row(f"first token, {load.name}", "kvtier", "clients", load.num_clients, seconds, more)


def first_token_target(load: Load) -> dict[str, object]:
    ratios = [each.p99 / each.p50 for each in load.rounds]
    found: Estimate = estimate(median(ratios), bounds(ratios))
    what = f"first token, p99 against p50, {load.num_clients} clients, {load.name}"
    return judged("N7", found, WANTED_FIRST_TOKEN, at_least=False, what=what)
