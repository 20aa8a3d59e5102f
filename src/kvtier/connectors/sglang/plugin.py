"""Plug-in of the entry point group ``sglang.srt.plugins``. SGLang calls it in each process."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

from kvtier.connectors.sglang.hooks import Hooks
from kvtier.telemetry.logs import log_in_engine

logger = logging.getLogger(__name__)

COPIES_VARIABLE = "KVTIER_SGLANG_COPIES"
"""In the environment: "1" has kvtier copy between SGLang's own pools on Ascend."""


def register() -> None:
    """Install the hooks around SGLang functions. Never raises.

    They measure steps, notice new weights, let requests wait for the linker, and provide copies
    that SGLang lacks on a CPU, or, if asked for, on Ascend. SGLang calls this whether kvtier is
    asked for or not, so a hook without a listener passes everything on.
    """
    log_in_engine(logging.root)
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.utils import is_cpu

        for name, hook in around().items():
            HookRegistry.register(name, hook, HookType.AROUND)
        if is_cpu():
            from kvtier.connectors.sglang.cpu_copies import hooks

            for name, hook in hooks().items():
                HookRegistry.register(name, hook, HookType.REPLACE)
        if os.environ.get(COPIES_VARIABLE, "0") not in ("", "0"):
            for name, hook in on_ascend().items():
                HookRegistry.register(name, hook, HookType.AROUND)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kvtier can not hook into this SGLang: %r", error)


def around() -> Hooks:
    """Those that stand around SGLang's own; none for what an older one does not have."""
    from kvtier.connectors.sglang import scheduler_hooks
    from kvtier.connectors.sglang.new_weights import NEW_WEIGHTS
    from kvtier.connectors.sglang.prefetches import PREFETCHES
    from kvtier.connectors.sglang.prefill import WATCH

    found = {**WATCH.hooks(), **NEW_WEIGHTS.hooks()}
    if not find_spec(scheduler_hooks.LINKER):
        return found
    return {**found, **scheduler_hooks.hooks(), **PREFETCHES.hooks()}


def on_ascend() -> Hooks:
    """Those of the copies on Ascend.

    None where there is no NPU, or another SGLang than is known, which is said.
    """
    from kvtier.connectors.sglang.contract import COPIES

    try:
        from sglang.srt.utils import is_npu

        if not is_npu():
            logger.info("%s is set, but SGLang does not run on an NPU", COPIES_VARIABLE)
            return {}
    except RuntimeError as error:  # torch_npu is there, and no NPU
        logger.info("%s is set, but %s", COPIES_VARIABLE, error)
        return {}
    from kvtier.connectors.sglang import ascend_copies

    if found := COPIES.differences():
        logger.warning("kvtier leaves its copies to SGLang: %s; %s", found[0], ascend_copies.LOSS)
        return {}
    return ascend_copies.COPIES.hooks
