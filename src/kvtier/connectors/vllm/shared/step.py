"""Requests of a step of vLLM's scheduler that compute a prompt, may store blocks, or wait.

vLLM's half of the offloading connector looks at every running request in every step: milliseconds
at hundreds of them. A request that generates has something new only when a page is full, and then
it is given the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.shared.prompt import group_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MAX_BLOCKS = 2048
"""Most blocks reported per prompt, and per step. Each costs a third of a microsecond on the
scheduler's thread. A burst of requests is reported over the following steps in order of arrival;
of a longer prompt only its beginning is reported."""

Tell = Callable[[Sequence[bytes], bool], None]
"""Called with a prompt's blocks, and whether its request begins to wait or waits no more."""


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


class DueRequests:
    """Finds the requests of each step that may have something to store.

    These are new and resumed requests, prompts that are computed, and requests that were given
    pages. A block of an answer is stored when its request needs the next page, or has finished.

    num_steps_early: vLLM allocates a page at most this many steps before the page in front of it is
    full: for speculative tokens, and for batches in flight.
    """

    def __init__(self, num_steps_early: int = 0) -> None:
        self._grown: deque[Collection[str]] = deque([()] * num_steps_early)
        """Requests that were given pages in each of the last steps."""

    @classmethod
    def for_config(cls, config: VllmConfig) -> DueRequests:
        guessed = getattr(config, "num_speculative_tokens", 0) or 0
        # Before 0.30 only vLLM's scheduler knows: as many as are guessed, or one more.
        ahead = getattr(config, "num_lookahead_tokens", guessed + bool(guessed))
        # Before 0.20 only vLLM's executor knows.
        num_batches = getattr(config, "max_concurrent_batches", 0)
        num_batches = num_batches or config.parallel_config.pipeline_parallel_size
        return cls(guessed + ahead + max(0, num_batches - 2))

    def find(self, output: SchedulerOutput) -> set[str]:
        """Return the requests of a step that may have something to store. Call it once a step."""
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        grown: Collection[str] = ()
        if any(cached.new_block_ids):
            named = zip(cached.req_ids, cached.new_block_ids, strict=True)
            grown = [name for name, pages in named if pages]
        if self._grown:
            self._grown.append(grown)
            grown = {*grown, *self._grown.popleft()}
        prompts = computed_prompts(output)
        if not (grown or prompts or new or cached.resumed_req_ids):
            return set()
        return {*grown, *prompts, *cached.resumed_req_ids, *(each.req_id for each in new)}

    def reduce(self, output: SchedulerOutput, is_due: bool) -> SchedulerOutput | None:
        """Return ``output`` without the requests that have nothing new.

        None for nothing at all, unless ``is_due``.
        """
        due = self.find(output)
        if not (due or is_due or _has_more(output)):
            return None
        if len(due) >= len(output.num_scheduled_tokens):
            return output
        reduced: Any = copy(output)
        num_tokens = output.num_scheduled_tokens
        reduced.num_scheduled_tokens = {
            name: num_tokens[name] for name in num_tokens if name in due
        }
        cached = output.scheduled_cached_reqs
        at = [place for place, name in enumerate(cached.req_ids) if name in due]
        reduced.scheduled_cached_reqs = copy(cached)
        reduced.scheduled_cached_reqs.req_ids = [cached.req_ids[each] for each in at]
        reduced.scheduled_cached_reqs.new_block_ids = [cached.new_block_ids[each] for each in at]
        return reduced


def _has_more(output: SchedulerOutput) -> bool:
    """Whether vLLM's half has to hear of something else than requests that run."""
    if output.finished_req_ids or output.preempted_req_ids:
        return True
    if getattr(output, "kv_cache_block_copies", None):
        return True
    state = getattr(output, "kv_connector_block_state", None)
    return state is not None and bool(state.boundary_state_offloads)


class QueuedRequests:
    """Reports each request once when it begins to wait, and once when it waits no more.

    A request that is scheduled in the first step after it came is not reported.

    hashes_per_block: number of vLLM's hashes per block. group: the KV group whose keys stand for
    those of all groups. tell: None if the cache learns nothing from requests.
    """

    def __init__(self, hashes_per_block: int, group: int, tell: Tell | None) -> None:
        self._hashes_per_block = hashes_per_block
        self._group = group
        self._tell = tell
        self._new: dict[str, Request] = {}
        self._told: dict[str, list[bytes]] = {}

    def on_queued(self, request: Request) -> None:
        """Note that a request joins the queue."""
        if self._tell is not None:
            self._new[request.request_id] = request

    def on_dequeued(self, request_id: str) -> None:
        """Note that a request was scheduled, or has ended."""
        self._new.pop(request_id, None)
        keys = self._told.pop(request_id, None)
        if keys is not None and self._tell is not None:
            self._tell(keys, False)

    def end_step(self) -> None:
        """Report requests that came before this step and were not scheduled in it."""
        num_left = MAX_BLOCKS
        while self._new and num_left > 0 and self._tell is not None:
            request_id = next(iter(self._new))
            keys = self._keys(self._new.pop(request_id))
            num_left -= max(1, len(keys))
            if keys:
                self._told[request_id] = keys
                self._tell(keys, True)

    def _keys(self, request: Request) -> list[bytes]:
        every = self._hashes_per_block
        block_hashes = request.block_hashes[every - 1 : every * MAX_BLOCKS : every]
        return [group_key(block_hash, self._group) for block_hash in block_hashes]
