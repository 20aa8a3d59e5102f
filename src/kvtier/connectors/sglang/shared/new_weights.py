"""Detects that SGLang replaces its weights while serving: hooks around its updates and its flush.

SGLang flushes its own cache with an update, unless the update disables it or requests are running.
Until a flush, pages in its cache are of the old weights, and so are pages that it would store.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kvtier.connectors.sglang.shared.hooks import Hooks

LOSS = "weights that are replaced while it serves would leave old KV behind: restart it instead"
"""Consequence, for the log, if the hooks could not be installed."""
MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER = f"{MODULE}.SchedulerWeightUpdaterManager"
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
WAYS = ("disk", "distributed", "tensor", "ipc")
SESSION = ("begin_weight_update", "end_weight_update")
"""Calls between which others may write the weights (RDMA). Older versions have none."""


class WeightsListener(Protocol):
    """Owner of KV that was computed with the weights."""

    def before_new_weights(self) -> None:
        """Forget all KV, and keep none: the weights are being replaced."""

    def after_new_weights(self) -> None:
        """Keep KV again: SGLang has emptied its own cache since the weights were replaced."""


class WeightsWatch:
    """Notifies listeners of new weights, on the scheduler's thread."""

    def __init__(self) -> None:
        self.listeners: list[WeightsListener] = []
        self._num_under_way = 0
        self._is_pool_old = False

    def hooks(self) -> Hooks:
        """Return the hooks around SGLang functions."""
        updates = [*(f"update_weights_from_{way}" for way in WAYS), *_session_calls()]
        return {
            **{f"{UPDATER}.{name}": self._update for name in updates},
            f"{UPDATER}.release_memory_occupation": self._release,
            FLUSH: self._flush,
        }

    def _update(self, update: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._forget()
        self._is_pool_old = True
        self._num_under_way += 1
        try:
            return update(*args, **more)
        finally:
            self._num_under_way -= 1
            if not self._is_pool_old:
                self._go_on()

    def _release(self, release: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Weights whose memory is released come back with any content."""
        if request.tags and "weights" not in request.tags:
            return release(updater, request)
        return self._update(release, updater, request)

    def _flush(self, flush: Callable[..., Any], *args: Any, **more: Any) -> Any:
        is_flushed = flush(*args, **more)
        if is_flushed and self._is_pool_old:
            self._is_pool_old = False
            if not self._num_under_way:
                self._forget()  # what was kept since then
                self._go_on()
        return is_flushed

    def _forget(self) -> None:
        for listener in self.listeners:
            listener.before_new_weights()

    def _go_on(self) -> None:
        for listener in self.listeners:
            listener.after_new_weights()


def _session_calls() -> list[str]:
    """Return those of ``SESSION`` that the installed SGLang has, by its sources."""
    try:
        spec = find_spec(MODULE)
    except ModuleNotFoundError:
        return []
    if spec is None or spec.origin is None:
        return []
    text = Path(spec.origin).read_text(encoding="utf-8")
    return [name for name in SESSION if f"def {name}(" in text]


NEW_WEIGHTS = WeightsWatch()
"""The one instance of this process."""
