"""Notice that SGLang replaces its weights while serving: hooks around its four update methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

LOSS = "weights that are replaced while it serves would leave old KV behind: restart it instead"
"""Consequence, for the log, if the hooks could not be installed."""
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WAYS = ("disk", "distributed", "tensor", "ipc")


class WeightsListener(Protocol):
    """Owner of KV that was computed with the weights."""

    def before_new_weights(self) -> None:
        """Forget all KV, since the weights are about to be replaced."""

    def after_new_weights(self) -> None:
        """Continue after the update, successful or not. SGLang has emptied its own cache."""


class WeightsWatch:
    """Notifies listeners of new weights, on the scheduler's thread."""

    def __init__(self) -> None:
        self._keepers: list[WeightsListener] = []

    def listen(self, keeper: WeightsListener) -> None:
        self._keepers.append(keeper)

    def leave(self, keeper: WeightsListener) -> None:
        self._keepers.remove(keeper)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return hooks around SGLang functions, by full name.

        Each hook gets the original function first.
        """
        return {f"{UPDATER}.update_weights_from_{way}": self._update for way in WAYS}

    def _update(self, update: Callable[..., Any], *args: Any, **more: Any) -> Any:
        for keeper in self._keepers:
            keeper.before_new_weights()
        try:
            return update(*args, **more)
        finally:
            for keeper in self._keepers:
                keeper.after_new_weights()


NEW_WEIGHTS = WeightsWatch()
"""The one instance of this process."""
