"""Hooks around SGLang's scheduler that measure steps, and report finished requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvtier.connectors.sglang.shared.hooks import Hooks
from kvtier.plan.steps import Observe, StepClock

LOSS = "what prefill takes is not known, all KV that is found is loaded, and nothing is recorded"
"""Consequence, for the log, if the hooks could not be installed."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
MAX_STEPS = 16
"""Most steps in progress; SGLang has dropped older ones."""


class PrefillWatch:
    """Measures each step, from its beginning to the processing of its result.

    Used on the scheduler's thread. clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step_listeners: list[Observe] = []
        self.begin_listeners: list[Callable[[Any, Any], None]] = []
        """Called with each SGLang ``Req`` in a step of prefill, and SGLang's tree. Must not raise.
        A prompt in pieces takes several steps."""
        self.end_listeners: list[Callable[[Any], None]] = []
        """Called with each SGLang ``Req`` that was computed and has finished. Must not raise."""
        self._steps = StepClock(self._tell)
        self._begun: OrderedDict[int, int] = OrderedDict()  # steps by the id of their result

    def hooks(self) -> Hooks:
        """Return the hooks around SGLang functions."""
        return {
            f"{SCHEDULER}.run_batch": self._run_batch,
            f"{SCHEDULER}.process_batch_result": self._process_batch_result,
        }

    def _run_batch(self, run: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        if not self.step_listeners or not batch.forward_mode.is_extend():
            return run(scheduler, batch, *rest)
        for begun in self.begin_listeners:
            for req in batch.reqs:
                begun(req, scheduler.tree_cache)
        pieces = list(zip(batch.prefix_lens or (), batch.extend_lens or (), strict=False))
        step = self._steps.begin(self._clock(), pieces)
        result = run(scheduler, batch, *rest)
        if step is not None:
            self._begun[id(result)] = step
            while len(self._begun) > MAX_STEPS:
                self._begun.popitem(last=False)
        return result

    def _process_batch_result(
        self, process: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        going = [req for req in batch.reqs if not req.finished()] if self.end_listeners else ()
        done = process(scheduler, batch, result)
        for req in going:
            if req.finished():
                for ended in self.end_listeners:
                    ended(req)
        if self.step_listeners:
            # Steps without a number count, too: the next step can't have begun earlier.
            self._steps.end(self._begun.pop(id(result), 0), self._clock())
        return done

    def _tell(self, num_before: int, num_tokens: int, seconds: float) -> None:
        for observe in self.step_listeners:
            observe(num_before, num_tokens, seconds)


WATCH = PrefillWatch()
"""The one instance of this process."""
