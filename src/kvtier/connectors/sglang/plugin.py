"""What SGLang calls in each of its processes (entry point group ``sglang.srt.plugins``)."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Watch what steps take and when weights are replaced, and bring the copies that SGLang lacks
    on a CPU. Called whether kvtier is asked for or not: so it never raises, and what it hooks
    passes on what nobody listens to."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.utils import is_cpu

        from kvtier.connectors.sglang.new_weights import NEW_WEIGHTS
        from kvtier.connectors.sglang.prefill import WATCH

        for name, hook in (WATCH.hooks() | NEW_WEIGHTS.hooks()).items():
            HookRegistry.register(name, hook, HookType.AROUND)
        if is_cpu():
            from kvtier.connectors.sglang.cpu_copies import hooks

            for name, hook in hooks().items():
                HookRegistry.register(name, hook, HookType.REPLACE)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kvtier can not hook into this SGLang: %r", error)
