"""Warm up the engine before its first request: pay one-time costs, and measure prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvtier.engine.config import EngineInfo
from kvtier.engine.paged import Span
from kvtier.engine.runner import ModelRunner
from kvtier.types import Slot

WARM_UP_TOKENS = 4096
"""Context of the longest piece that is computed."""


def warm_up(
    runner: ModelRunner, info: EngineInfo, observe: Callable[[int, int, float], None]
) -> None:
    """Run the model, and tell ``observe`` what prefill costs.

    Of a chunk, of a short one, and of one with much before it.

    observe: takes the tokens before, those computed, and seconds. The pool is empty, so the blocks
    that this writes to are nobody's.
    """
    chunk = min(info.chunk_tokens, info.max_model_tokens - 1)
    far = min(WARM_UP_TOKENS, info.max_model_tokens - 1) - chunk
    slots = [Slot(slot) for slot in range((far + chunk) // info.block_size + 1)]
    runner.prefill([0] * chunk, Span(slots, 0, chunk))  # pays for what comes only once
    for first, num_tokens in ((0, chunk), (0, max(1, chunk // 4)), (far, chunk)):
        span = Span(slots, first, first + num_tokens)
        observe(first, num_tokens, _least_seconds(partial(runner.prefill, [0] * num_tokens, span)))
    runner.decode([0], [Span(slots, chunk, chunk + 1)])


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the least time of a few runs of ``work``.

    The first run counts only if it takes so long that another would take too long.
    """
    times: list[float] = []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 0.3) and sum(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
