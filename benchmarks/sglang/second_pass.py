"""The same prompts sent twice: first computed, then served from device, host and storage.

The device holds a part of the prompts. The second pass begins with the prompts that it still has;
the others are loaded from below it or computed again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.engines.report import Row, changed, judged_row, spread
from benchmarks.engines.requests import BEYOND, tokens
from benchmarks.engines.servers import Server, Size
from kvtier.tools.report.stats import median_with_interval

FROM_DEVICE = 0.35
"""Share of the prompts that the device should serve."""
ROOM = 0.4
"""Share of the prompts that the device can hold. The running request needs some of it."""
GROUPS = 6
"""Groups of prompts with equal shares of device hits. The interval is that of their ratios."""
OUTPUT_TOKENS = 4
TTFT_SAVED = -0.95
KIND = "second pass"


@dataclass(frozen=True, slots=True)
class Twice:
    """Both passes of one prompt."""

    first_ms: float
    second_ms: float
    on_device: bool
    """Whether the second request came while the device should have the prompt."""
    same_answer: bool
    """Whether both passes generated the same tokens."""


@dataclass(frozen=True, slots=True)
class SecondPass:
    """Second pass of one contestant."""

    prompts: list[Twice]
    prompt_tokens: int
    device_share: float
    """Share of the second pass' tokens that the engine found on the device."""
    tier_share: float
    """Share of the second pass' tokens that were loaded from below the device."""


def size_for(num_prompts: int, num_blocks: int) -> Size:
    """Return a server size whose device holds a part of the prompts."""
    return Size(int(ROOM * num_prompts) * (num_blocks + 1) + num_blocks + 1)


def order(num_prompts: int) -> tuple[list[int], list[int]]:
    """Return the order of the second pass: prompts on the device, and the others."""
    num_device = round(FROM_DEVICE * num_prompts)
    everyone = list(range(num_prompts))
    return everyone[num_prompts - num_device :], everyone[: num_prompts - num_device]


def measure_second_pass(
    server: Server, num_prompts: int, num_blocks: int, seed: int, say: Callable[[str], None]
) -> SecondPass:
    """Measure both passes on a server of size ``size_for``."""
    length = num_blocks * server.contestant.block + BEYOND
    server.ask(tokens(seed - 1, length), OUTPUT_TOKENS)
    prompts = [tokens(seed + number, length) for number in range(num_prompts)]
    first = []
    for prompt in prompts:
        first.append(server.ask(prompt, OUTPUT_TOKENS, logprobs=1))
        server.settle()
    assert not any(each.cached_tokens for each in first), "a prompt was known before"
    before = server.tokens()
    on_device, others = order(num_prompts)
    found = []
    for number in (*on_device, *others):
        answer = server.ask(prompts[number], OUTPUT_TOKENS, logprobs=1)
        server.settle()
        before_it = first[number]
        same = answer.texts == before_it.texts
        found.append(Twice(before_it.ttft_ms, answer.ttft_ms, number in on_device, same))
    counted = server.tokens().since(before)
    result = SecondPass(
        found,
        length,
        (counted.cached - counted.from_tier) / counted.prompt,
        counted.from_tier / counted.prompt,
    )
    again = statistics.mean(each.second_ms for each in found)
    cold = statistics.mean(each.ttft_ms for each in first)
    say(f"{server.contestant.name}, second pass: {again:.0f} ms, cold {cold:.0f} ms")
    return result


def rows(contestant: str, found: SecondPass) -> list[Row]:
    """Return the row of one contestant, as a list."""
    return [
        {
            "kind": KIND,
            "contestant": contestant,
            "prompts": len(found.prompts),
            "prompt_tokens": found.prompt_tokens,
            "first_ttft_ms": round(statistics.mean(e.first_ms for e in found.prompts), 1),
            "ttft_ms": round(statistics.mean(e.second_ms for e in found.prompts), 1),
            "from_device_ms": mean_ms(prompt for prompt in found.prompts if prompt.on_device),
            "from_below_ms": mean_ms(prompt for prompt in found.prompts if not prompt.on_device),
            "device_share": round(found.device_share, 4),
            "from_tier_share": round(found.tier_share, 4),
            "same_answers": sum(prompt.same_answer for prompt in found.prompts),
            "ttft_ratio": spread(median_with_interval(ratios(found.prompts))),
        }
    ]


def mean_ms(prompts: Iterable[Twice]) -> float:
    """Return the mean time to first token of the second pass."""
    return round(statistics.mean(prompt.second_ms for prompt in prompts), 1)


def ratios(prompts: Sequence[Twice]) -> list[float]:
    """Return the ratios of the mean times to first token, second pass to first, by group.

    All groups have equally many prompts from the device and from below, as far as possible.
    """
    num_groups = min(GROUPS, len(prompts))
    alike = sorted(prompts, key=lambda each: each.on_device)
    groups = [alike[at::num_groups] for at in range(num_groups)]
    return [
        statistics.mean(each.second_ms for each in group)
        / statistics.mean(each.first_ms for each in group)
        for group in groups
    ]


def targets(found: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Return T1: the change of the mean time to first token."""
    return [
        {
            "id": "T1",
            "contestant": row["contestant"],
            **judged_row(changed(row["ttft_ratio"], lambda ratio: ratio - 1), TTFT_SAVED),
        }
        for row in found
        if row["contestant"] in names
    ]
