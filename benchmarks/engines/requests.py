"""Single requests to several servers in turn: equal answers, and the cost of new prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.engines.protocol import Answer
from benchmarks.engines.servers import Server

Each = TypeVar("Each")

VOCABULARY = range(10, 4000)
BEYOND = 50
"""Tokens after the last full block. Hits in the engine's pool and below it then end at the same
place, and the rest is computed alike."""
CHECK_BLOCKS = 7
CHECK_TOKENS = 8
RIVALS = 4


def tokens(seed: int, count: int) -> list[int]:
    """Return a prompt that shares no block with that of another seed."""
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Check:
    """Prompts to one contestant: computed, from the engine's own pool, and from below it."""

    contestant: str
    prompts: int
    from_pool: int
    from_tier: int
    same_tokens: int
    same_logprobs: int
    """Prompts with all log-probabilities from below equal to those from the pool, bit for bit."""
    same_as_first: int
    """Prompts whose tokens from below are equal to what the first contestant computed."""

    def failure(self, has_tier: bool) -> str | None:
        """Return what is wrong as text, or None."""
        if self.from_pool < self.prompts:
            return f"only {self.from_pool} of {self.prompts} prompts were found in the pool"
        if has_tier and self.from_tier < self.prompts:
            return f"only {self.from_tier} of {self.prompts} prompts came back from below"
        for what in ("same_tokens", "same_logprobs", "same_as_first"):
            if getattr(self, what) < self.prompts and (has_tier or what != "same_logprobs"):
                return f"{what.replace('_', ' ')}: {getattr(self, what)} of {self.prompts} prompts"
        return None


def check(servers: Sequence[Server], num_prompts: int) -> list[Check]:
    """Send the same prompts to every server. The pools need room for a prompt."""
    cached = CHECK_BLOCKS * servers[0].contestant.block
    prompts = [tokens(seed, cached + BEYOND) for seed in range(num_prompts)]
    found, first_texts = [], []
    for server in servers:
        counts = dict.fromkeys(("pool", "tier", "tokens", "logprobs", "first"), 0)
        for number, prompt in enumerate(prompts):
            computed = server.ask(prompt, CHECK_TOKENS, RIVALS)
            if server is servers[0]:
                first_texts.append(computed.texts)
            pool = server.ask(prompt, CHECK_TOKENS, RIVALS)
            server.settle()
            server.reset()
            tier = server.ask(prompt, CHECK_TOKENS, RIVALS)
            counts["pool"] += pool.cached_tokens == cached
            counts["tier"] += tier.cached_tokens == cached
            counts["tokens"] += computed.texts == pool.texts == tier.texts
            counts["logprobs"] += pool.steps == tier.steps
            counts["first"] += tier.texts == first_texts[number]
        found.append(Check(server.contestant.name, num_prompts, *counts.values()))
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt with nothing to reuse."""

    contestant: str
    ttft_ms: float
    tpot_ms: float
    """Time per further token."""
    cpu_s: float
    """CPU seconds of all the server's processes, until the last token arrived."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Burst:
    """Several prompts at once."""

    contestant: str
    tokens_per_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class NewPrompts:
    """Times of servers that were started together, by prompt and by burst."""

    asked: list[list[Asked]]
    bursts: list[list[Burst]]


def in_turn(those: Sequence[Each], number: int) -> list[Each]:
    """Return the items rotated, so that another one is first each time."""
    first = number % len(those)
    return [*those[first:], *those[:first]]


def ask_new(
    servers: Sequence[Server],
    num_prompts: int,
    prompt_tokens: int,
    output_tokens: int,
    first_seed: int,
) -> list[list[Asked]]:
    """Send new prompts, one after the other, each to every server in turn.

    Return a list per prompt, in the servers' order. The first prompt warms up and is left out.
    """
    rows = []
    for number in range(num_prompts + 1):
        prompt = tokens(first_seed + number, prompt_tokens)
        row = {}
        for server in in_turn(servers, number):
            cpu_s = server.cpu_s()
            answer = server.ask(prompt, output_tokens)
            row[server] = _asked(server, answer, output_tokens, server.cpu_s() - cpu_s)
            server.settle()
        if number:
            rows.append([row[server] for server in servers])
    return rows


def _asked(server: Server, answer: Answer, output_tokens: int, cpu_s: float) -> Asked:
    tpot_ms = (answer.total_ms - answer.ttft_ms) / max(1, output_tokens - 1)
    return Asked(server.contestant.name, answer.ttft_ms, tpot_ms, cpu_s, answer.cached_tokens)


def burst_new(
    servers: Sequence[Server],
    num_bursts: int,
    num_prompts: int,
    prompt_tokens: int,
    output_tokens: int,
    first_seed: int,
) -> list[list[Burst]]:
    """Send new prompts as ``ask_new`` does, but several at a time.

    The rate counts tokens in and out.
    """
    rows = []
    num_tokens = num_prompts * (prompt_tokens + output_tokens)
    with ThreadPoolExecutor(num_prompts) as pool:
        for number in range(num_bursts):
            seed = first_seed + number * num_prompts
            prompts = [tokens(seed + each, prompt_tokens) for each in range(num_prompts)]
            row = {}
            for server in in_turn(servers, number):
                cpu_s = server.cpu_s()
                begin = time.perf_counter()
                for done in [pool.submit(server.ask, prompt, output_tokens) for prompt in prompts]:
                    done.result()
                seconds, cpu_s = time.perf_counter() - begin, server.cpu_s() - cpu_s
                row[server] = Burst(server.contestant.name, num_tokens / seconds, cpu_s)
                server.settle()
            rows.append([row[server] for server in servers])
    return rows
