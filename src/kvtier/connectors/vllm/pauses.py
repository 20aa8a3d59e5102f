"""Tells a pause of the engine from a reset that comes with other weights.

vLLM resets its connector in both cases and gives no reason: when it goes to sleep or is paused with
``clear_cache``, and when somebody resets it because weights were replaced. A pause alone leaves
the weights as they are, so KV outside the device stays right. Weights are replaced by a call into
the ranks (``collective_rpc``), or go with a sleep of level 2. Both are seen in vLLM's engine core,
which is hooked here where kvtier is asked for.

Every doubt counts as other weights: a call that is not known to leave them alone, an engine core
inside the caller's process (whose model anybody can reach), ranks that others can call (Ray).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)

LEAVE_WEIGHTS = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Calls of vLLM's own into the ranks that replace no weights."""
EXECUTORS = ("mp", "uni")
"""Ranks that nobody but the engine core can call."""
HOOKED = ("_reset_caches", "sleep", "collective_rpc")


class Resets(Protocol):
    """A connector in the scheduler's process."""

    def reset_for_weights(self) -> None:
        """Forget all KV: other weights may have come after a pause."""


class Pauses:
    """State of one engine core: whether it is pausing, and whether its weights may be others.

    Used on the engine core's thread.
    """

    def __init__(self) -> None:
        self._connectors: WeakSet[Resets] = WeakSet()
        self._is_pausing = False
        self._may_differ = False  # since the last reset that emptied the tiers
        self._has_kept = False  # since then, too
        self._has_emptied = False  # in the pause that is under way

    def watch(self, connector: Resets) -> None:
        """Tell ``connector`` of weights that come after a pause."""
        self._connectors.add(connector)

    def keep(self) -> bool:
        """Return whether the reset that is under way leaves the weights as they are."""
        if self._is_pausing and not self._may_differ:
            self._has_kept = True
            return True
        self._has_emptied = True
        if not self._is_pausing:
            self._settle()
        return False

    def _settle(self) -> None:
        """The tiers are empty: from now on their KV is of the weights that are there now."""
        self._may_differ = self._has_kept = self._has_emptied = False

    def reset_caches(self, core: EngineCore, reset: Callable[[], Any]) -> Any:
        """Run the reset that is a part of a pause."""
        self._is_pausing, self._has_emptied = _is_closed(core), False
        try:
            return reset()
        finally:
            self._is_pausing = False
            if self._has_emptied:
                self._settle()

    def weights_may_differ(self) -> None:
        """Note that the weights were perhaps replaced, or are about to be."""
        self._may_differ = True
        if self._has_kept:
            self._has_kept = False
            for each in list(self._connectors):
                each.reset_for_weights()


PAUSES = Pauses()


def watch(connector: Resets) -> None:
    """Hook the engine core of this process, and tell ``connector`` of other weights."""
    from vllm.v1.engine.core import EngineCore

    PAUSES.watch(connector)
    if any(not hasattr(EngineCore, name) for name in HOOKED):
        logger.info("this vLLM's pauses can't be told from other resets: each empties the tiers")
    elif not hasattr(EngineCore.sleep, "__wrapped__"):
        _hook(EngineCore)


def _hook(core: type[EngineCore]) -> None:
    reset_caches, sleep, collective_rpc = (getattr(core, name) for name in HOOKED)

    @functools.wraps(reset_caches)
    def reset_in_a_pause(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        return PAUSES.reset_caches(self, lambda: reset_caches(self, *args, **kwargs))

    @functools.wraps(sleep)
    def sleep_hooked(self: EngineCore, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            PAUSES.weights_may_differ()
        return sleep(self, level, *args, **kwargs)

    @functools.wraps(collective_rpc)
    def rpc_hooked(self: EngineCore, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return collective_rpc(self, method, *args, **kwargs)
        finally:
            if method not in LEAVE_WEIGHTS:
                PAUSES.weights_may_differ()

    for name, hooked in zip(HOOKED, (reset_in_a_pause, sleep_hooked, rpc_hooked), strict=True):
        setattr(core, name, hooked)


def _is_closed(core: EngineCore) -> bool:
    """Whether weights can be replaced only by calls that are seen here."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    backend = core.vllm_config.parallel_config.distributed_executor_backend
    is_hooked = type(core).collective_rpc is EngineCore.collective_rpc
    return isinstance(core, EngineCoreProc) and is_hooked and backend in EXECUTORS
