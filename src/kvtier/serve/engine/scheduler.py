"""Continuous batching: admission and order of execution. Owned by the engine thread.

Requests are admitted by turn (``waiting.py``), once the device tier has room for all the blocks
that they may need, so a running request is never preempted. A request that waits for storage lets
others pass.

A step computes chunks of prompts, by turn, and then one more token for every decoding request.
Chunks are computed one at a time, because each has to be alone in its forward for reproducible
bits. A prompt is computed to its end before the next one begins, because half a prefill is useless.
A step has as many chunks as take about as long as its decode. So prefill gets about half of the
time for any number of decoding requests; with few of them a step has one chunk.

A prompt whose prefix is being loaded waits for it while others compute. If there are no others, it
begins at once and follows the load layer by layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kvtier.cache.lease import StoreListener
from kvtier.cache.tokens import Cache, PromptEstimate
from kvtier.cache.transfer import LayerGate
from kvtier.core.errors import DeviceError
from kvtier.core.types import Label
from kvtier.plan import PromptCost
from kvtier.serve.engine.audits import Audits
from kvtier.serve.engine.config import EngineInfo
from kvtier.serve.engine.request import Marks, Request, Stage, Token, Turn
from kvtier.serve.engine.runner import Runner
from kvtier.serve.engine.sampling import NO_TOKEN, choose, logprobs
from kvtier.serve.engine.waiting import Hints, WaitingRequests

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROMPT_TOKENS = 4
"""Prompt tokens computed per step and decoding sequence: about as much work as the sequence's one
token, which is multiplied alone but reads its whole context."""

OTHER_WEIGHTS = (
    "The answer so far was computed upon KV that was stored for other weights; send the request "
    "again."
)

MAX_LOADS = 3
"""Failed loads of one request after which it computes everything itself."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A prompt that was not submitted, and the requests that it would meet.

    turn: its turn if it were queued now.
    requests: all that run or wait.
    """

    estimate: PromptEstimate
    turn: Turn
    requests: Sequence[Request]

    def cost(self) -> PromptCost:
        """Return the cost of the prompt. Any thread may call this."""
        decision, unknown_in = self.estimate
        before = (request.uncomputed for request in self.requests if request.turn < self.turn)
        times_s = (decision.costs.prefill_s(rest.start, rest.stop) for rest in before)
        queue_s = sum(times_s, start=0.0)
        return PromptCost.of(decision, queue_s, unknown_in)


class Scheduler:
    """Requests between submission and completion."""

    def __init__(
        self,
        cache: Cache,
        runner: Runner,
        info: EngineInfo,
        audits: Audits,
        max_running: int,
        follow_loads: bool = True,
        meet_loads: bool = True,
    ) -> None:
        self._cache = cache
        self._hints = Hints(cache)
        self._runner = runner
        self._info = info
        self._grain_blocks = info.chunk_tokens // info.block_size
        self._max_running = max_running
        self.follow_loads = follow_loads
        self._meet_loads = meet_loads
        self._audits = audits
        self._waiting = WaitingRequests(cache)
        self._aborted: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Add a new request."""
        match = self._cache.match(request.namespace, request.labels)
        request.num_known = match.num_blocks * self._info.block_size
        self._waiting.join(request, len(request.uncomputed))
        self._hints.came(request)

    def preview(self, namespace: bytes, labels: Sequence[Label], num_tokens: int) -> Preview:
        """Return what a prompt would cost if it were queued now. Changes nothing."""
        estimate = self._cache.estimate(namespace, labels, num_tokens, self._grain_blocks)
        num_known = estimate.decision.match.num_blocks * self._info.block_size
        turn = self._waiting.next_turn(num_tokens - num_known)
        return Preview(estimate, turn, list(self._everybody()))

    def abort(self, request: Request) -> None:
        """End a request in the next step, unless it has ended."""
        self._aborted.append(request)

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self._waiting)

    def step(self) -> bool:
        """Do one step of everything that can be done. Return False if there was nothing to do."""
        self._cache.poll()
        self._end_aborted()
        self._admit()
        for request in self.running:
            if request.stage is Stage.LOADING:
                self._check_load(request)
        num_chunks = self._prefill()
        if not num_chunks and all(r.stage is Stage.LOADING for r in self.running):
            num_chunks = self._begin_early()
        decoding = [r for r in self.running if r.stage is Stage.DECODE]
        if decoding:
            self._decode(decoding)
        self._audits.step(self._is_idle)
        return bool(num_chunks or decoding)

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits, loads or computes its prompt."""
        return not self._waiting and all(r.stage is Stage.DECODE for r in self.running)

    def num_blocks(self, request: Request) -> int:
        """Return the blocks that a request may need: prompt and output."""
        num_tokens = len(request.prompt) + request.params.max_tokens
        return -(-num_tokens // self._info.block_size)

    # -- from waiting to prefill ------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit requests that may run now; read storage for those that have to wait."""
        self._waiting.look_at_storage()
        while len(self.running) < self._max_running:
            request = self._waiting.whose_turn()
            if request is None or not self._fetch(request):
                break
            self._waiting.leave(request)
            self.running.append(request)
        self._hints.tell_who_waits()
        self._waiting.read_ahead()

    def _fetch(self, request: Request) -> bool:
        """Take a lease for the request. Return False if there is no room now."""
        began = time.perf_counter()
        request.lease = self._cache.fetch(
            request.namespace,
            request.labels,
            num_tokens=len(request.prompt),
            num_blocks=self.num_blocks(request),
            grain_blocks=self._grain_blocks,
            load=request.may_load,
            from_both_ends=self._meet_loads and self._is_alone(request),
        )
        if request.lease is None:
            request.stage = Stage.WAITING
            return False
        request.marks = Marks(fetch_began=began, fetch_ended=time.perf_counter())
        if request.on_stored is not None:
            request.lease.stores = StoreListener(request.on_stored)
        self._hints.begins(request)
        request.stage = Stage.LOADING
        request.may_follow, request.has_followed = self.follow_loads, False
        self._waiting.end_prefetch(request)
        return True

    def _is_alone(self, request: Request) -> bool:
        """Whether no other request waits, loads or computes its prompt."""
        others = (other for other in self._everybody() if other is not request)
        return all(other.stage is Stage.DECODE for other in others)

    def _check_load(self, request: Request) -> None:
        """After a load has ended, begin the prefill, or fetch again without the load."""
        lease = request.lease
        assert lease is not None
        if not lease.ready:
            return
        if lease.broken:
            # Lost blocks are not found again; a late load may be late again.
            request.num_broken_loads += 1
            request.may_load = not lease.late and request.num_broken_loads < MAX_LOADS
            self._refetch(request)
            return
        request.stage = Stage.PREFILL

    def _refetch(self, request: Request) -> None:
        """Release the lease and take a new one; without room, return to the queue."""
        assert request.lease is not None
        self._cache.release(request.lease, record=False)
        if not self._fetch(request):
            self.running.remove(request)
            self._waiting.rejoin(request)
            self._hints.came(request)

    # -- prefill ----------------------------------------------------------------------------------

    def _prefill(self) -> int:
        """Compute the chunks of prompts of this step. Return their number."""
        num_decoding = sum(r.stage is Stage.DECODE for r in self.running)
        num_tokens = max(1, PROMPT_TOKENS * num_decoding)
        num_chunks = 0
        loading = {
            r for r in self.running if r.stage is Stage.LOADING and r.lease and r.lease.coming
        }
        while num_tokens > 0:
            waiting = (r for r in self.running if r.stage is Stage.PREFILL or r in loading)
            request = min(waiting, key=lambda r: r.turn, default=None)
            if request is None:
                break
            if request in loading:
                num = self._guarded(request, self._prefill_front) or 0
                if not num:
                    loading.remove(request)
                    continue
            else:
                num = self._guarded(request, self._prefill_chunk) or 0
            num_tokens -= num
            num_chunks += 1
        return num_chunks

    def _prefill_front(self, request: Request) -> int:
        """Compute the next chunk of a prefix that is loaded from its end.

        Returns the number of tokens; 0 if the load comes sooner, or is under way there.
        """
        lease, size = request.lease, self._info.block_size
        assert lease is not None
        with self._cache.claim(lease, self._grain_blocks) as blocks:
            if not blocks:
                return 0
            start, end = blocks.start * size, blocks.stop * size
            began = time.perf_counter()
            span = self._runner.span(lease, start, end)
            self._runner.prefill_tail(request.prompt[start:end], span, 1)
            ended = time.perf_counter()
        self._cache.observe_prefill(start, end - start, ended - began)
        request.marks.note_prefill(began, ended)
        return end - start

    def _begin_early(self) -> int:
        """Let the first request that can do so follow its load, layer by layer.

        Called while nothing else computes, and once per lease: if it fails, the request waits as
        usual. Returns the number of chunks, 0 or 1.
        """
        for request in self.running:
            assert request.lease is not None
            gate = self._cache.follow(request.lease) if request.may_follow else None
            if gate is not None:
                request.may_follow = False
                self._guarded(request, partial(self._prefill_chunk, gate=gate))
                return 1
        return 0

    def _has_arrived(self, request: Request) -> bool:
        """Whether all KV that a request's computation used has arrived: else discard it."""
        self._cache.poll()
        assert request.lease is not None
        return request.lease.ready and not request.lease.broken

    def _prefill_chunk(self, request: Request, gate: LayerGate | None = None) -> int:
        """Compute the prompt up to the next point of the grid.

        gate: of loads in flight. If they fail or take too long, the computation is discarded and
        the request continues to load.
        Returns the number of tokens; 0 if they were discarded.
        """
        lease = request.lease
        assert lease is not None
        if request.num_computed == 0:
            if self._others_computed_more(request):
                self._refetch(request)
                return 0
            size = self._info.block_size
            hits = lease.record.hit_blocks
            request.hit_tokens = {tier: num * size for tier, num in hits.items() if num}
            request.num_computed = lease.num_shared * size
            request.num_cached = sum(request.hit_tokens.values())
        start, grid = request.num_computed, self._info.chunk_tokens
        end = min((start // grid + 1) * grid, len(request.prompt))
        began = time.perf_counter()
        span = self._runner.span(lease, start, end)
        try:
            keep = 1 if request.params.prompt_logprobs is None else end - start
            rows = self._runner.prefill_tail(request.prompt[start:end], span, keep, gate)
        except DeviceError as error:
            if gate is None:
                raise
            logger.info("load not followed error=%s", error)
            request.num_computed = request.num_cached = 0
            return 0
        ended = time.perf_counter()
        if gate is None:
            self._cache.observe_prefill(start, end - start, ended - began)
        elif self._has_arrived(request):
            request.stage = Stage.PREFILL
            request.has_followed = True
        else:
            request.num_computed = request.num_cached = 0
            return 0
        request.marks.note_prefill(began, ended)
        request.num_computed = end
        if end == len(request.prompt) or end % (self._runner.commit_chunks * grid) == 0:
            self._commit(request)
        if request.params.prompt_logprobs is not None:
            request.score(start, rows)
        if end == len(request.prompt):
            request.stage = Stage.DECODE
            self._audits.choose(request)
            if request.params.max_tokens:
                self._add(request, choose(rows[-1:], [request.sampler])[0], rows[-1])
            else:
                self._end(request, "length")
        return end - start

    def _commit(self, request: Request) -> None:
        """Commit the computed whole chunks of the prompt to the cache."""
        lease, grid = request.lease, self._info.chunk_tokens
        assert lease is not None
        computed = min(request.num_computed, len(request.prompt))
        num_blocks = computed // grid * grid // self._info.block_size
        if request.labels and num_blocks > lease.num_shared:
            if not self._audits.follows:
                self._cache.commit(lease, num_blocks)
                return
            # A tier may have some of them already, as another process computed them.
            known = self._cache.match(request.namespace, request.labels[:num_blocks])
            num_known = max(known.num_blocks, lease.num_shared)
            self._cache.commit(lease, num_blocks)
            self._audits.written.note(lease.blocks[num_known:])

    def _others_computed_more(self, request: Request) -> bool:
        """Whether more of the prompt was committed since the lease was taken."""
        assert request.lease is not None
        if not request.may_load:
            return False
        match = self._cache.match(request.namespace, request.labels)
        if match.num_blocks <= request.lease.num_shared:
            return False
        plan = self._cache.plan(match, len(request.prompt), self._grain_blocks)
        return plan.num_reused_blocks > request.lease.num_shared

    # -- decode -----------------------------------------------------------------------------------

    def _decode(self, requests: list[Request]) -> None:
        """Compute one more token for each of ``requests``."""
        spans = [
            self._runner.span(r.lease, r.num_computed, r.num_computed + 1)
            for r in requests
            if r.lease
        ]
        try:
            rows = self._runner.decode([r.last_token for r in requests], spans)
            token_ids = choose(rows, [r.sampler for r in requests])
        except RuntimeError as error:
            logger.exception("decode failed num_requests=%d", len(requests))
            for request in requests:
                self._end(request, "error", f"The model failed while decoding: {error}")
            return
        for request, token_id, logits in zip(requests, token_ids, rows, strict=True):
            request.num_computed += 1
            self._guarded(request, partial(self._add, token_id=token_id, logits=logits))

    def _add(self, request: Request, token_id: int, logits: torch.Tensor) -> None:
        """Add a token chosen from ``logits`` (float32 [vocab_size]); it may be the last one."""
        if token_id == NO_TOKEN:
            raise ValueError("the model's logits are no numbers")
        params, shaper = request.params, request.sampler.shaper
        if shaper is not None:
            if not shaper.error:
                shaper.accept(token_id)
            if shaper.error:
                raise ValueError(shaper.error)
        token = Token(token_id)
        if params.num_logprobs is not None:
            token = Token(token_id, *logprobs(logits.cpu(), token_id, params.num_logprobs))
        request.add(token, logits.cpu().numpy().copy() if params.keep_logits else None)
        if token_id in request.ends or (shaper is not None and shaper.is_complete):
            self._end(request, "stop")
        elif len(request.tokens) >= params.max_tokens:
            self._end(request, "length")

    # -- endings ----------------------------------------------------------------------------------

    def _guarded(self, request: Request, work: Callable[[Request], T]) -> T | None:
        """Run one request's part of a step; an error ends only this request."""
        try:
            return work(request)
        except Exception as error:
            logger.exception("request failed stage=%s", request.stage.value)
            self._end(request, "error", f"The request failed: {error}")
            return None

    def _end(self, request: Request, reason: str, error: str = "") -> None:
        self._waiting.end_prefetch(request)
        if request.lease is not None:
            if reason == "abort":
                self._commit(request)
            self._hints.ends(request)
            if request.wants_explanation and self._is_idle:
                self._audits.audit(request)
            request.note_lease(request.lease)
            is_complete = reason in ("stop", "length")
            if not self._audits.has_ended(request, is_complete):
                self._cache.release(request.lease)
            request.lease = None
            self._hints.has_ended(request)
        self._hints.goes(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self._waiting.leave(request)
        request.finish(reason, error)

    def _end_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        for request in aborted:
            if request.stage is not Stage.DONE:
                self._end(request, "abort")

    def rename(self, settle: Callable[[Request], None], fails_answers: bool = True) -> None:
        """Change the namespaces, because the KV found so far may be another model's, or wrong.

        Requests without a token begin again. Requests that computed all of their KV continue.

        settle: sets the namespace of a request.
        fails_answers: whether requests that generated tokens from cached KV end with an error.
        """
        for request in self._everybody():
            self._waiting.end_prefetch(request)
            self._hints.goes(request)
            settle(request)
        for request in [r for r in self.running if r.stage is not Stage.DECODE]:
            request.num_computed = request.num_cached = 0
            request.hit_tokens = {}
            self._refetch(request)
        for request in [r for r in self.running if r.stage is Stage.DECODE]:
            request.labels = ()
            if request.num_cached and fails_answers:
                self._end(request, "error", OTHER_WEIGHTS)

    def fail_all(self, error: str) -> None:
        """End every request with an error."""
        for request in self._everybody():
            self._end(request, "error", error)

    def abort_all(self) -> None:
        """Abort every request."""
        for request in self._everybody():
            self._end(request, "abort")

    def _everybody(self) -> Iterator[Request]:
        yield from (*self.running, *self._waiting)
