"""Spans of a request: fetch, load, prefill, store."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cache.lease import PrefixStored
from kvtier.observe.traces import Attributes, RequestSpan
from kvtier.plan.explain import COMPUTED
from kvtier.serve.engine import Completion
from kvtier.serve.server.responses import Usage


def tell(
    span: RequestSpan, completions: Sequence[Completion], usage: Usage, model: str, error: str
) -> None:
    """End the span of a request. completions: of its choices that have ended."""
    for completion in completions:
        _tell_choice(span, completion)
    attributes: Attributes = {
        "model": model,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
    span.end(attributes, error)


def _tell_choice(span: RequestSpan, completion: Completion) -> None:
    marks, told = completion.marks, completion.explanation
    if marks is None or not marks.fetch_ended:
        return
    planned: dict[str, str | int | float | bool] = {
        "waited_s": marks.fetch_began - marks.submitted,
        "prompt_tokens": completion.num_prompt_tokens,
    }
    if told is not None:
        planned["reused_tokens"] = told.num_reused
        planned["predicted_load_s"] = told.chosen.load_s
        planned["predicted_compute_s"] = told.chosen.recompute_s
        for part in told.parts:
            name = f"{part.source}_tokens"
            planned[name] = int(planned.get(name, 0)) + part.end - part.first
    span.child("fetch", marks.fetch_began, marks.fetch_ended, planned)
    if marks.load_bytes:
        loaded = {
            name: value
            for name, value in planned.items()
            if name.endswith("_tokens")
            and name not in (f"{COMPUTED}_tokens", "prompt_tokens", "reused_tokens")
        }
        ended = max(marks.fetch_ended, marks.fetch_began + marks.load_s)
        span.child("load", marks.fetch_ended, ended, {"bytes": marks.load_bytes, **loaded})
    if marks.prefill_ended:
        computed: Attributes = {
            "tokens": completion.num_prompt_tokens - completion.num_cached_tokens,
            "compute_s": marks.prefill_s,
        }
        span.child("prefill", marks.prefill_began, marks.prefill_ended, computed)


def tell_stored(span: RequestSpan, stored: PrefixStored, ended_s: float) -> None:
    """Add a span for a copy to a slower tier that ended at ``ended_s``."""
    attributes: Attributes = {
        "tier": stored.tier,
        "blocks": stored.num_blocks,
        "bytes": stored.num_bytes,
    }
    span.child("store", ended_s - stored.seconds, ended_s, attributes, stored.error)
