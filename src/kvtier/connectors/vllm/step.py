"""Work of one engine step, as vLLM's scheduler tells connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def prefill_pieces(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Return, per prompt that this step computes, the tokens before, and those of the step."""
    new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    old = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    num = output.num_scheduled_tokens
    return [(before, num[req_id]) for req_id, before in (*new, *old) if num[req_id] > 1]
