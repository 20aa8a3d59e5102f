"""What SGLang calls in each of its processes (entry point group ``sglang.srt.plugins``)."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Bring what SGLang lacks where it runs. Called whether kvtier is asked for or not: so it never
    raises, and does nothing on an accelerator."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.utils import is_cpu

        if not is_cpu():
            return
        from kvtier.connectors.sglang.cpu_copies import hooks

        for name, hook in hooks().items():
            HookRegistry.register(name, hook, HookType.REPLACE)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kvtier brings no copies to this SGLang: %r", error)
