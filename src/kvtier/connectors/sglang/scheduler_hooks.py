"""Hold requests in SGLang's queue while their KV is promoted, or looked up in stores.

Hooks around its scheduler's choice of what to compute next do that.

SGLang takes whatever is first in its queue, and asks what is kept of it only then. So the requests
near the head are looked up before, and those that wait are taken out of the queue while it chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvtier.connectors.sglang.prompt_reporting import keys_up_to
from kvtier.keyed.waiters import WaitState

if TYPE_CHECKING:  # a process that does not ask for kvtier pays for nothing
    from kvtier.connectors.sglang.promotion import PromptPromotion

LOSS = "no request waits for KV on disk: it is found by the next one that begins alike"
"""Consequence, for the log, if the hooks could not be installed."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
WRAPPER = f"{LINKER}.UnifiedCacheLinkerWrapper"
NUM_AHEAD = 32
"""Requests at the head of the queue that are looked up before their turn."""
REST_S = 2e-4
"""Slept in a step in which everything waits: SGLang's loop would hold up those who read."""


class QueueGate:
    """Holds back requests that wait, on the thread of one scheduler.

    Every rank holds back the same requests: those that wait on any rank. No request waits longer
    than each rank's own deadline.
    """

    def __init__(self, bringing: PromptPromotion) -> None:
        self._bringing = bringing
        self._looked_up: set[str] = set()
        self._asking: set[str] = set()  # that wait for answers, on some rank
        self._passed: set[str] = set()

    def choose(self, scheduler: Any, is_idle: bool, choose: Callable[[], Any]) -> Any:
        """Return SGLang's choice of requests to compute, without those that wait.

        is_idle: nothing else runs.
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
        if not queue:
            self._looked_up.clear()
            self._asking.clear()
            self._passed.clear()
            self._bringing.forget()
            return set()
        asked = [req for req in queue[:NUM_AHEAD] if req.rid not in self._passed]
        if not asked:
            return set()
        waits = torch.tensor([self._wait(req, cache) for req in asked], dtype=torch.int)
        cache._all_reduce_attn_groups(waits, torch.distributed.ReduceOp.MAX)
        pairs = zip(asked, waits.tolist(), strict=True)
        held = {req.rid for req, wait in pairs if self._is_held(req.rid, wait)}
        self._passed.update(req.rid for req in asked if req.rid not in held)
        there = {req.rid for req in queue}
        self._passed &= there
        self._looked_up &= there
        self._asking &= there
        self._bringing.keep_only(there)
        return held

    def _is_held(self, rid: str, wait: int) -> bool:
        """wait: of all ranks together. When all have heard what stores have, all look again."""
        if wait == WaitState.ANSWERS:
            self._asking.add(rid)
        elif rid in self._asking:
            self._asking.discard(rid)
            self._looked_up.discard(rid)
            return True
        return wait != WaitState.OVER

    def _wait(self, req: Any, cache: Any) -> WaitState:
        if req.rid not in self._looked_up:  # the same on all ranks: they reduce what they find
            self._looked_up.add(req.rid)
            with self._bringing.ahead():
                req.init_next_round_input(cache, cow_mamba=False)  # looks it up
        return self._bringing.wait(req.rid)


def hooks() -> dict[str, Callable[..., Any]]:
    """Return hooks around SGLang functions, by full name.

    Each hook gets the original function first.
    """
    return {f"{SCHEDULER}.get_new_batch_prefill": _choose, **told_by()}


def told_by() -> dict[str, Callable[..., Any]]:
    """Those of them that tell of prompts."""
    return {f"{WRAPPER}.match": _match, f"{WRAPPER}._offload_node": _offload_node}


def _linker(wrapper: Any) -> Any:
    """Ours; None where SGLang has another, or none."""
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
    """Return the key of the page in front of a node; None at the beginning of a prompt."""
    found = core.snapshot_buffer_backup(node, False)
    return None if found is None else found.parent_last_hash
