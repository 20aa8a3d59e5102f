"""One request: what was asked, where it stands, what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Event

import numpy as np
import numpy.typing as npt

from kvtier.engine.sampling import Sampler, SamplingParams
from kvtier.errors import CacheError
from kvtier.ladder import Prefetch
from kvtier.lease import Lease
from kvtier.types import Label

Turn = tuple[int, int]
"""A request's place in line: the lowest is next."""


class RequestError(CacheError, ValueError):
    """The request can't be served as it is; the message says why and what to change."""


class EngineBusy(CacheError):  # noqa: N818 - a state, not a failure
    """The queue is full; try again later."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. logprob: None where it was not asked for. top_logprobs: (token id, log
    probability), best first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request.

    finish_reason: "stop", "length", "abort" or "error" (then ``error`` says why).
    num_cached_tokens: prompt tokens that were not computed; hit_tokens: the same by tier.
    ttft_s, e2e_s: from submission to the first token, and to the end.
    logits: float32 [num_tokens, vocab_size] where ``keep_logits`` was asked for.
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


class Stage(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """The engine's own view of a request. Touched by the engine thread only.

    num_computed: tokens whose KV is in the pool. labels: of the prompt's whole grid cells.
    salt: as it was submitted. namespace: where its KV is looked up, said by the engine thread.
    turn: among those that wait, and those that are computed.
    may_follow: its prefill has not tried yet to begin before its lease is ready.
    """

    prompt: Sequence[int]
    params: SamplingParams
    salt: str
    labels: Sequence[Label]
    on_token: Callable[[Token], None] | None
    on_done: Callable[[Completion], None] | None
    sampler: Sampler
    submitted: float = field(default_factory=time.perf_counter)
    namespace: bytes = b""
    turn: Turn = (0, 0)
    stage: Stage = Stage.WAITING
    prefetch: Prefetch | None = None
    lease: Lease | None = None
    may_load: bool = True
    may_follow: bool = False
    num_broken_loads: int = 0
    num_computed: int = 0
    num_cached: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    first_token_s: float = 0.0
    finished: Event = field(default_factory=Event)
    completion: Completion | None = None

    @property
    def last_token(self) -> int:
        return self.tokens[-1].token_id

    def add(self, token: Token, logits: npt.NDArray[np.float32] | None) -> None:
        """The next token was chosen."""
        if not self.tokens:
            self.first_token_s = time.perf_counter() - self.submitted
        self.tokens.append(token)
        if logits is not None:
            self.logits.append(logits)
        if self.on_token is not None:
            self.on_token(token)

    def finish(self, reason: str, error: str = "") -> None:
        """Make the completion and tell whoever waits. The first ending counts."""
        if self.finished.is_set():
            return
        self.stage = Stage.DONE
        self.completion = Completion(
            token_ids=tuple(token.token_id for token in self.tokens),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached,
            hit_tokens=dict(self.hit_tokens),
            ttft_s=self.first_token_s,
            e2e_s=time.perf_counter() - self.submitted,
            logits=np.stack(self.logits) if self.logits else None,
        )
        self.finished.set()
        if self.on_done is not None:
            self.on_done(self.completion)


class RequestHandle:
    """The caller's end of a request. Safe to use from any thread."""

    def __init__(self, request: Request, abort: Callable[[Request], None]) -> None:
        self._request = request
        self._abort = abort

    @property
    def done(self) -> bool:
        return self._request.finished.is_set()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. TimeoutError when ``timeout_s`` passed first; the request goes on."""
        if not self._request.finished.wait(timeout_s):
            raise TimeoutError(f"the request did not end within {timeout_s} s")
        assert self._request.completion is not None
        return self._request.completion

    def abort(self) -> None:
        """End the request early; its completion has what was generated so far."""
        self._abort(self._request)
