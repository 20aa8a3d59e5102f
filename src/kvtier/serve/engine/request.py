"""One request: its input, state and outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Event

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cache.ladder import Prefetch
from kvtier.cache.lease import Lease, PrefixStored
from kvtier.core.errors import CacheError
from kvtier.core.hints import Hint, HintResult
from kvtier.core.types import Label
from kvtier.plan import Actual, Explanation, explain
from kvtier.serve.engine.sampling import Sampler, SamplingParams, prompt_logprobs

logger = logging.getLogger(__name__)

Turn = tuple[int, int]
"""A request's place in the queue: the lowest is next."""


class RequestError(CacheError, ValueError):
    """The request cannot be served as it is; the message says why and what to change."""


class EngineBusy(CacheError):  # noqa: N818 - a state, not a failure
    """The queue is full; try again later."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    logprob: None if not requested.
    top_logprobs: (token id, log probability), best first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Outcome of a request.

    finish_reason: "stop", "length", "abort" or "error" (then ``error`` says why).
    num_cached_tokens: prompt tokens that were not computed.
    hit_tokens: the same by tier.
    ttft_s, e2e_s: time from submission to the first token, and to the end.
    logits: float32 [num_tokens, vocab_size] if ``keep_logits`` is set.
    prompt_tokens: the prompt with log probabilities if ``prompt_logprobs`` is set; the first token
    has none.
    explanation: on request, if the request was scheduled.
    marks: times of its events.
    hint_results: of the client's hints.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[Token, ...]
    finish_reason: str
    error: str
    num_prompt_tokens: int
    num_cached_tokens: int
    hit_tokens: Mapping[str, int]
    ttft_s: float
    e2e_s: float
    logits: npt.NDArray[np.float32] | None
    prompt_tokens: tuple[Token, ...] = ()
    explanation: Explanation | None = None
    marks: Marks | None = None
    hint_results: tuple[HintResult, ...] = ()


@dataclass(slots=True)
class Marks:
    """Times of a request's events by ``time.perf_counter``; 0 if they did not happen.

    fetch: match, plan and start of copies; of repeated ones the last.
    load_s: time from then until all of its prefix had arrived.
    load_bytes: bytes copied to the device for it.
    prefill: begin of the first chunk and end of the last one.
    prefill_s: total time of all chunks.
    """

    submitted: float = 0.0
    fetch_began: float = 0.0
    fetch_ended: float = 0.0
    load_s: float = 0.0
    load_bytes: int = 0
    prefill_began: float = 0.0
    prefill_ended: float = 0.0
    prefill_s: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    def note_prefill(self, began: float, ended: float) -> None:
        """Note the times of a chunk."""
        self.prefill_began = self.prefill_began or began
        self.prefill_ended = ended
        self.prefill_s += ended - began


class Stage(Enum):
    """Stage of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """The engine's state of a request. Used by the engine thread only.

    num_computed: tokens whose KV is in the pool.
    labels: of the prompt's whole grid cells.
    salt: as submitted.
    namespace: where its KV is looked up; set by the engine thread.
    turn: place among waiting requests and prefills.
    num_known: tokens of the prompt that were cached when it was queued.
    may_follow: its prefill may try once to begin before its lease is ready.
    has_followed: whether that succeeded.
    wants_audit: whether its hit is audited, whatever the share of hits that are.
    audit: the outcome of an audit of its hit, in words.
    wants_explanation: whether to explain the source of its prompt's KV.
    hint: the client's hints.
    is_waited_for: whether the cache was told that it waits.
    ends: tokens that end the answer.
    on_prompt: called with ``prompt_tokens`` when they are complete, before the first token.
    """

    prompt: Sequence[int]
    params: SamplingParams
    salt: str
    labels: Sequence[Label]
    on_token: Callable[[Token], None] | None
    on_done: Callable[[Completion], None] | None
    sampler: Sampler
    ends: frozenset[int] = frozenset()
    on_prompt: Callable[[Sequence[Token]], None] | None = None
    submitted: float = field(default_factory=time.perf_counter)
    namespace: bytes = b""
    turn: Turn = (0, 0)
    num_known: int = 0
    stage: Stage = Stage.WAITING
    prefetch: Prefetch | None = None
    lease: Lease | None = None
    may_load: bool = True
    may_follow: bool = False
    has_followed: bool = False
    wants_explanation: bool = False
    on_stored: Callable[[PrefixStored], None] | None = None
    hint: Hint | None = None
    hint_results: list[HintResult] = field(default_factory=list)
    is_waited_for: bool = False
    explanation: Explanation | None = None
    wants_audit: bool = False
    audit: str = ""
    marks: Marks = field(default_factory=Marks)
    num_broken_loads: int = 0
    num_computed: int = 0
    num_cached: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: list[Token] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    first_token_s: float = 0.0
    finished: Event = field(default_factory=Event)
    completion: Completion | None = None

    @property
    def last_token(self) -> int:
        return self.tokens[-1].token_id

    @property
    def uncomputed(self) -> range:
        """Positions of prompt tokens that are still to be computed. Any thread may read it."""
        num_tokens = len(self.prompt)
        return range(min(max(self.num_known, self.num_computed), num_tokens), num_tokens)

    def score(self, start: int, logits: torch.Tensor) -> None:
        """Add the log probabilities of prompt tokens that follow from a chunk's logits.

        start: first token of the chunk.
        logits: float32 [num_tokens, vocab_size], CPU.
        """
        if start == 0:
            self.prompt_tokens = [Token(self.prompt[0])]
        assert self.params.prompt_logprobs is not None
        next_ids = self.prompt[start + 1 : start + 1 + len(logits)]
        found = prompt_logprobs(logits[: len(next_ids)], next_ids, self.params.prompt_logprobs)
        self.prompt_tokens += map(Token, next_ids, *zip(*found, strict=True)) if found else ()
        if len(self.prompt_tokens) == len(self.prompt) and self.on_prompt is not None:
            self.on_prompt(tuple(self.prompt_tokens))

    def add(self, token: Token, logits: npt.NDArray[np.float32] | None) -> None:
        """Add the next token."""
        if not self.tokens:
            self.marks.first_token = time.perf_counter()
            self.first_token_s = self.marks.first_token - self.submitted
        self.tokens.append(token)
        if logits is not None:
            self.logits.append(logits)
        if self.on_token is not None:
            self.on_token(token)

    def note_lease(self, lease: Lease) -> None:
        """Keep the records of its lease, which is about to end."""
        self.marks.load_s, self.marks.load_bytes = lease.record.load_s, lease.record.load_bytes
        is_logged = logger.isEnabledFor(logging.DEBUG)
        if lease.decision is not None and (self.wants_explanation or is_logged):
            self.explanation = explain(lease.decision, self._actual(lease))
            logger.debug("prompt %s", self.explanation)

    def _actual(self, lease: Lease) -> Actual:
        marks = self.marks
        return Actual(
            arrivals=lease.record.arrivals,
            load_s=lease.record.load_s,
            compute_s=marks.prefill_s if marks.prefill_ended else None,
            waited_s=marks.fetch_began - self.submitted,
            first_token_s=self.first_token_s if self.tokens else None,
            num_failed_loads=self.num_broken_loads,
            overlaps=self.has_followed or bool(lease.claimed),
            claimed=lease.claimed,
            audit=self.audit,
        )

    def finish(self, reason: str, error: str = "") -> None:
        """Create the completion and notify waiters. Only the first call counts."""
        if self.finished.is_set():
            return
        self.stage = Stage.DONE
        self.marks.submitted, self.marks.ended = self.submitted, time.perf_counter()
        self.completion = Completion(
            token_ids=tuple(token.token_id for token in self.tokens),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached,
            hit_tokens=dict(self.hit_tokens),
            ttft_s=self.first_token_s,
            e2e_s=self.marks.ended - self.submitted,
            logits=np.stack(self.logits) if self.logits else None,
            prompt_tokens=tuple(self.prompt_tokens),
            explanation=self.explanation,
            marks=self.marks,
            hint_results=tuple(self.hint_results),
        )
        self.finished.set()
        if self.on_done is not None:
            self.on_done(self.completion)


class RequestHandle:
    """The caller's handle of a request. Thread-safe."""

    def __init__(self, request: Request, abort: Callable[[Request], None]) -> None:
        self._request = request
        self._abort = abort

    @property
    def done(self) -> bool:
        return self._request.finished.is_set()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Raises TimeoutError after ``timeout_s``; the request continues."""
        if not self._request.finished.wait(timeout_s):
            raise TimeoutError(f"the request did not end within {timeout_s} s")
        assert self._request.completion is not None
        return self._request.completion

    def abort(self) -> None:
        """End the request early; its completion has what was generated so far."""
        self._abort(self._request)
