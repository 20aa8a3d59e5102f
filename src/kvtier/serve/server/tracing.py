"""Spans of a request: the answer, and in it fetch, load, prefill, store.

The answer's span has the attributes of OpenTelemetry's semantic conventions for HTTP servers and
for generative AI. The names of the latter are not stable there yet, so they stand here.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from kvtier.cache.lease import PrefixStored
from kvtier.observe.traces import Attributes, RequestSpan
from kvtier.plan.explain import COMPUTED
from kvtier.serve.engine import Completion, SamplingParams
from kvtier.serve.server.errors import ApiError, ClientGone
from kvtier.serve.server.responses import Usage
from kvtier.serve.server.schemas import ChatRequest, GenerationRequest

MAX_AGENT = 256
"""Characters of a client's ``User-Agent`` that a span has."""


def attributes_of_request(
    request: Request, asked: GenerationRequest, params: SamplingParams
) -> Attributes:
    """Return what is known of a request before it is submitted. params: of its first choice."""
    url, client = request.url, request.client
    attributes: dict[str, str | int | float | bool | Sequence[str] | None] = {
        "http.request.method": request.method,
        "http.route": url.path,
        "url.path": url.path,
        "url.scheme": url.scheme,
        "server.address": url.hostname,
        "server.port": url.port,
        "client.address": None if client is None else client.host,
        "network.protocol.version": request.scope.get("http_version"),
        "user_agent.original": request.headers.get("user-agent", "")[:MAX_AGENT] or None,
        "kvtier.request_id": request.state.header_id,
        "gen_ai.operation.name": "chat" if isinstance(asked, ChatRequest) else "text_completion",
        "gen_ai.provider.name": "kvtier",
        "gen_ai.output.type": "text" if asked.response_format is None else "json",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.choice.count": asked.n if asked.n > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": asked.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def end_failed(span: RequestSpan, error: BaseException, more: Attributes | None = None) -> None:
    """End the span of a request that has no answer but an error.

    The client's own faults (4xx) leave the span's status unset, as the conventions want it.
    """
    attributes = dict(more or {})
    kind = type(error).__name__
    if not isinstance(error, ClientGone):
        status = error.status if isinstance(error, ApiError) else 500
        attributes["http.response.status_code"] = status
        if status < 500:
            span.end(attributes)
            return
        if isinstance(error, ApiError):
            kind = error.code or str(status)
    span.end({**attributes, "error.type": kind}, kind)


def end_answered(span: RequestSpan, more: Attributes, is_complete: bool) -> None:
    """End the span of a request whose answer was sent, or was begun."""
    attributes = {"http.response.status_code": 200, **more}
    if is_complete:
        span.end(attributes)
    else:
        span.end({**attributes, "error.type": "incomplete"}, "the answer is not complete")


def attributes_of_answer(
    answer_id: str, model: str, usage: Usage, finish_reasons: Sequence[str], first_s: float | None
) -> Attributes:
    """Return what is known of an answer. first_s: time to its first chunk, of a stream."""
    attributes: dict[str, str | int | float | bool | Sequence[str]] = {
        "gen_ai.response.id": answer_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": finish_reasons,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    if first_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_s
    return attributes


def add_parts(span: RequestSpan, completion: Completion) -> None:
    """Add the spans of a choice that has ended."""
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
