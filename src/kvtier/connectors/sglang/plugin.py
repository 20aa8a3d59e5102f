"""Plug-in of the entry point group ``sglang.srt.plugins``. SGLang calls it in each process."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

from kvtier.connectors.common.environment import asked
from kvtier.connectors.sglang.shared.hooks import Hooks
from kvtier.observe.logs import log_in_engine

logger = logging.getLogger(__name__)

COPIES_VARIABLE = "KVTIER_SGLANG_COPIES"
"""Environment variable: "1" has kvtier copy between SGLang's own pools on Ascend."""


def register() -> None:
    """Install the hooks around SGLang functions. Never raises.

    They measure steps, notice new weights, let requests wait for the linker, and provide copies
    that SGLang lacks on a CPU, or, if enabled, on Ascend. If the environment asks for kvtier, one
    adds its options. SGLang calls this even if kvtier is not used, so a hook without a listener
    only calls the original.
    """
    log_in_engine(logging.root)
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.utils import is_cpu

        for name, hook in wrapping_hooks().items():
            HookRegistry.register(name, hook, HookType.AROUND)
        if asked():
            from sglang.srt.server_args import ServerArgs

            from kvtier.connectors.sglang.shared.environment import add_storage, hooked_method

            method = f"sglang.srt.server_args.ServerArgs.{hooked_method(ServerArgs)}"
            HookRegistry.register(method, add_storage, HookType.BEFORE)
        if is_cpu():
            from kvtier.connectors.sglang.copies.cpu_copies import hooks

            for name, hook in hooks().items():
                HookRegistry.register(name, hook, HookType.REPLACE)
        if os.environ.get(COPIES_VARIABLE, "0") not in ("", "0"):
            for name, hook in ascend_hooks().items():
                HookRegistry.register(name, hook, HookType.AROUND)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kvtier can not hook into this SGLang: %r", error)


def wrapping_hooks() -> Hooks:
    """Return the hooks around SGLang functions, as far as the installed SGLang has these."""
    from kvtier.connectors.sglang.linker import scheduler_hooks
    from kvtier.connectors.sglang.shared.new_weights import NEW_WEIGHTS
    from kvtier.connectors.sglang.shared.prefill import WATCH
    from kvtier.connectors.sglang.shared.prompt_reporting import PREFETCHES
    from kvtier.connectors.sglang.shared.tier_events import TIER_EVENTS

    found = {**WATCH.hooks(), **NEW_WEIGHTS.hooks()}
    try:
        has_linker = find_spec(scheduler_hooks.LINKER) is not None
    except ModuleNotFoundError:  # nor the package that it would be in: SGLang 0.5.17 and older
        has_linker = False
    if not has_linker:
        return found
    return {**found, **scheduler_hooks.hooks(), **PREFETCHES.hooks(), **TIER_EVENTS.hooks()}


def ascend_hooks() -> Hooks:
    """Return the hooks of the copies on Ascend.

    Returns none, and logs why, if there is no NPU or the SGLang version is unknown.
    """
    from kvtier.connectors.sglang.shared.contract import COPIES

    try:
        from sglang.srt.utils import is_npu

        if not is_npu():
            logger.info("%s is set, but SGLang does not run on an NPU", COPIES_VARIABLE)
            return {}
    except RuntimeError as error:  # torch_npu is installed, but there is no NPU
        logger.info("%s is set, but %s", COPIES_VARIABLE, error)
        return {}
    from kvtier.connectors.sglang.copies import ascend_copies

    if found := COPIES.differences():
        logger.warning("kvtier leaves its copies to SGLang: %s; %s", found[0], ascend_copies.LOSS)
        return {}
    return ascend_copies.COPIES.hooks
