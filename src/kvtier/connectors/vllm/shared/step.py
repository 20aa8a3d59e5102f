"""Work of one engine step, as vLLM's scheduler reports it to connectors."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def computed_prompts(output: SchedulerOutput) -> Collection[str]:
    """Return the requests that get more than their next token, and guesses behind it."""
    num_tokens, guesses = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    num_guessed = sum(map(len, guesses.values())) if guesses else 0
    if output.total_num_scheduled_tokens == len(num_tokens) + num_guessed:
        return ()
    return [name for name, num in num_tokens.items() if num > 1 + len(guesses.get(name, ()))]


def prefill_pieces(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Return, per prompt that this step computes, the tokens before, and those of the step."""
    prompts = computed_prompts(output)
    if not prompts:
        return []
    new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    before = dict((*new, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)))
    return [(before[name], output.num_scheduled_tokens[name]) for name in prompts]
