"""Detects that vLLM's weights are replaced while it serves, and that a pause leaves them alone.

Weights are replaced by a call into the ranks (``collective_rpc``), or lost in a sleep of level 2.
vLLM reports neither to its connector. It only resets the connector when it sleeps or is paused with
``clear_cache``, without a reason. The engine core is therefore hooked here if kvtier is in use.

A call that replaces weights by its name, or that has done so before, gives KV another name at once.
Around any other call that is not known to leave the weights alone, all weights are read on the
ranks. Every doubt counts as other weights: a call that fails; weights that can't be read; and at a
pause, an engine core inside the caller's process (any code there can reach the model) and ranks
that other processes can call (Ray). ``rank_weights.py`` detects, in the ranks, changes that bypass
the engine core.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from kvtier.connectors.vllm.shared.rank_weights import digests

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)

LEAVE_WEIGHTS = frozenset({
    "check_health", "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums",
    "get_encoder_timing_stats", "get_model_inspection", "init_weight_transfer_engine", "list_loras",
    "profile", "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
    "synchronize_device", "update_max_model_len",
})  # fmt: skip
"""Calls of vLLM's own into the ranks that replace no weights."""
REPLACE_WEIGHTS = frozenset({
    "discard", "finish_weight_update", "load_model", "reload_weights", "reset_weights", "sleep",
    "start_draft_weight_update", "start_weight_update", "update_weights", "wake_up",
})  # fmt: skip
"""Calls of vLLM's own into the ranks after which weights are others, or can't be read."""
EXECUTORS = ("mp", "uni")
"""Executors whose ranks only the engine core can call."""


class Connector(Protocol):
    """A connector in the scheduler's process."""

    def reset_for_weights(self) -> None:
        """Forget all KV: other weights are in memory."""

    def pool_was_emptied(self) -> None:
        """Note that vLLM's own prefix cache has nothing left."""


class NewWeights:
    """State of one engine core. Used on the engine core's thread.

    Attributes:
        is_pausing: the reset that is under way is a part of a pause, and leaves the weights alone.
    """

    def __init__(self) -> None:
        self.is_pausing = False
        self._connectors: WeakSet[Connector] = WeakSet()
        self._replacing = set(REPLACE_WEIGHTS)

    def watch(self, connector: Connector) -> None:
        """Notify ``connector`` of new weights from now on."""
        self._connectors.add(connector)

    def reset_caches(self, core: EngineCore, call: Callable[[], Any]) -> Any:
        """Run the reset that is a part of a pause."""
        self.is_pausing = _is_closed(core)
        try:
            return call()
        finally:
            self.is_pausing = False

    def reset_pool(self, core: EngineCore, call: Callable[[], bool]) -> bool:
        """Run a reset of vLLM's own prefix cache."""
        is_empty = call()
        if is_empty:
            for connector in list(self._connectors):
                connector.pool_was_emptied()
        return is_empty

    def sleep(self, core: EngineCore, level: int, call: Callable[[], Any]) -> Any:
        """Put the engine to sleep. At level 2 its weights are lost."""
        if level > 1:
            self.tell(f"a sleep of level {level}")
        return call()

    def call_ranks(self, core: EngineCore, method: object, call: Callable[[], Any]) -> Any:
        """Run a call into the ranks, and notify connectors if it may have replaced the weights."""
        if method in LEAVE_WEIGHTS:
            return call()
        before = None if method in self._replacing else _digests(core)
        after = None
        try:
            found = call()
            after = before and _digests(core)
            return found
        finally:
            if after is None or after != before:
                if isinstance(method, str):
                    self._replacing.add(method)
                self.tell(str(method))

    def tell(self, cause: str) -> None:
        """Notify connectors that the weights were replaced, or are about to be."""
        logger.warning("%s may have replaced the weights: KV has another name now", cause)
        for connector in list(self._connectors):
            connector.reset_for_weights()


NEW_WEIGHTS = NewWeights()
"""The one instance of this process."""


def watch(connector: Connector) -> None:
    """Hook the engine core of this process, and notify ``connector`` of new weights."""
    from vllm.v1.engine.core import EngineCore

    NEW_WEIGHTS.watch(connector)
    if hasattr(EngineCore.collective_rpc, "__wrapped__"):
        return
    hook(EngineCore, "reset_prefix_cache", NEW_WEIGHTS.reset_pool)
    hook(EngineCore, "_reset_caches", NEW_WEIGHTS.reset_caches)
    hook(EngineCore, "sleep", NEW_WEIGHTS.sleep, 1)
    hook(EngineCore, "collective_rpc", NEW_WEIGHTS.call_ranks, 1)


def hook(core: type[EngineCore], name: str, ours: Callable[..., Any], num_taken: int = 0) -> None:
    """Replace a method of vLLM's by ``ours``.

    It gets the engine core, the first ``num_taken`` arguments, and a function that calls vLLM's.
    """
    theirs = getattr(core, name, None)
    if theirs is None:
        logger.info("this vLLM's engine core has no %s: each reset empties tiers", name)
        return
    parameters = signature(theirs)

    @functools.wraps(theirs)
    def hooked(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(self, *args, **kwargs)
        given.apply_defaults()
        taken = given.args[1 : 1 + num_taken]
        return ours(self, *taken, lambda: theirs(self, *args, **kwargs))

    setattr(core, name, hooked)


def _digests(core: EngineCore) -> list[bytes] | None:
    """Return the digest of each rank's weights; None if they can't be read.

    A sleep takes the memory of weights away, and reading it then would end the process.
    """
    if getattr(core.vllm_config.model_config, "enable_sleep_mode", False):
        return None
    found: list[bytes | None] = core.model_executor.collective_rpc(digests)
    return None if None in found else [each for each in found if each is not None]


def _is_closed(core: EngineCore) -> bool:
    """Whether weights can be replaced only by calls that are seen here."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    backend = core.vllm_config.parallel_config.distributed_executor_backend
    is_hooked = type(core).collective_rpc is EngineCore.collective_rpc
    return isinstance(core, EngineCoreProc) and is_hooked and backend in EXECUTORS
