"""Hooks around SGLang's scheduler that hold requests in its queue while their KV is promoted.

SGLang schedules the first request in its queue, and looks up its prefix only then. The requests
near the head are therefore looked up in advance. Waiting ones are taken out of the queue while
SGLang chooses its next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvtier.connectors.sglang.shared.hooks import Hooks
from kvtier.connectors.sglang.shared.prompt_reporting import keys_up_to
from kvtier.plan.decide import WaitState

if TYPE_CHECKING:  # a process that does not use kvtier must not import it
    from kvtier.connectors.sglang.linker.promotion import PromptPromotion

LOSS = "no request waits for KV on disk: it is found by the next one that begins alike"
"""Consequence, for the log, if the hooks could not be installed."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
WRAPPER = f"{LINKER}.UnifiedCacheLinkerWrapper"
NUM_AHEAD = 32
"""Requests at the head of the queue that are looked up in advance."""
REST_S = 2e-4
"""Sleep in a step in which all requests wait: SGLang's busy loop would slow the reading threads."""


class GatePhase(Enum):
    """State of a request near the head of the queue, which is the same on all ranks."""

    LOOKED_UP = auto()
    """Its prompt was looked up; it may wait for promotions."""
    ANSWERS = auto()
    """It waits for look-ups in storage on some rank, and is then looked up again."""
    PASSED = auto()
    """It waits no more."""


class QueueGate:
    """Holds back waiting requests, on the thread of one scheduler.

    Every rank holds back a request if it waits on any rank. No request waits longer than the
    longest of the ranks' deadlines.
    """

    def __init__(self, promotion: PromptPromotion) -> None:
        self._promotion = promotion
        self._phases: dict[str, GatePhase] = {}

    def choose(self, scheduler: Any, is_idle: bool, choose: Callable[[], Any]) -> Any:
        """Return SGLang's choice of requests to compute, without waiting ones.

        Args:
            scheduler: SGLang's scheduler.
            is_idle: whether no batch is running.
            choose: SGLang's own choice.
        """
        held = self._held(scheduler)
        if not held:
            return choose()
        queue = scheduler.waiting_queue
        scheduler.waiting_queue = [req for req in queue if req.rid not in held]
        try:
            return choose()
        finally:
            waiting = [req for req in queue if req.rid in held]
            scheduler.waiting_queue = waiting + scheduler.waiting_queue
            if is_idle and len(waiting) == len(queue):
                time.sleep(REST_S)

    def _held(self, scheduler: Any) -> set[str]:
        queue, cache = scheduler.waiting_queue, scheduler.tree_cache
        asked = [
            req for req in queue[:NUM_AHEAD] if self._phases.get(req.rid) is not GatePhase.PASSED
        ]
        if queue and not asked:
            return set()
        held: set[str] = set()
        if asked:
            waits = torch.tensor([self._wait(req, cache) for req in asked], dtype=torch.int)
            cache._all_reduce_attn_groups(waits, torch.distributed.ReduceOp.MAX)
            pairs = zip(asked, waits.tolist(), strict=True)
            held = {req.rid for req, wait in pairs if self._is_held(req.rid, wait)}
        queued = {req.rid for req in queue}
        self._phases = {rid: phase for rid, phase in self._phases.items() if rid in queued}
        self._promotion.keep_only(queued)
        return held

    def _wait(self, req: Any, cache: Any) -> WaitState:
        if req.rid not in self._phases:  # the same on all ranks, since look-ups are reduced
            self._phases[req.rid] = GatePhase.LOOKED_UP
            with self._promotion.ahead():
                req.init_next_round_input(cache, cow_mamba=False)  # looks it up
        return self._promotion.wait(req.rid)

    def _is_held(self, rid: str, wait: int) -> bool:
        """Whether to hold a request back. When all look-ups are answered, it is looked up again.

        wait: the greatest ``WaitState`` of all ranks.
        """
        if wait == WaitState.ANSWERS:
            self._phases[rid] = GatePhase.ANSWERS
        elif self._phases[rid] is GatePhase.ANSWERS:
            del self._phases[rid]
            return True
        elif wait == WaitState.OVER:
            self._phases[rid] = GatePhase.PASSED
            return False
        return True


def hooks() -> Hooks:
    """Return the hooks around SGLang functions."""
    return {f"{SCHEDULER}.get_new_batch_prefill": _choose, **reporting_hooks()}


def reporting_hooks() -> Hooks:
    """Return those of the hooks that report prompts."""
    return {f"{WRAPPER}.match": _match, f"{WRAPPER}._offload_node": _offload_node}


def _linker(wrapper: Any) -> Any:
    """Return kvtier's linker; None if SGLang has another one, or none."""
    linker = getattr(wrapper, "cache_linker", None)
    return linker if isinstance(getattr(linker, "gate", None), QueueGate) else None


def _choose(choose: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    linker = _linker(getattr(scheduler.tree_cache, "linker", None))
    if linker is None:
        return choose(scheduler, running_batch)
    is_idle = running_batch.is_empty()
    return linker.gate.choose(scheduler, is_idle, lambda: choose(scheduler, running_batch))


def _match(match: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    linker = _linker(wrapper)
    if linker is None:
        return match(wrapper, key, req, result)
    node, num_cached = result.last_device_node, result.device_prefix_len
    linker.note_prompt(num_cached, len(key))
    before = partial(keys_up_to, wrapper.cache, node)
    with linker.asking.looking_up(req, num_cached, before):
        return match(wrapper, key, req, result)


def _offload_node(offload: Callable[..., Any], wrapper: Any, node: Any, transfers: Any) -> Any:
    linker = _linker(wrapper)
    if linker is not None:
        linker.asking.note_node(partial(_key_before, wrapper.cache.tree_core, node))
    return offload(wrapper, node, transfers)


def _key_before(core: Any, node: Any) -> str | None:
    """Return the key of the page before a node; None at the beginning of a prompt."""
    found = core.snapshot_buffer_backup(node, False)
    return None if found is None else found.parent_last_hash
