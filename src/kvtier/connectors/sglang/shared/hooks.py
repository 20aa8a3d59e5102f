"""Hooks around SGLang functions, and a check that each hook is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

logger = logging.getLogger(__name__)

Hooks = Mapping[str, Callable[..., Any]]
"""Wrappers or replacements, by the full name of the SGLang function.

A wrapper gets the original function first.
"""


def tell_missing(hooks: Hooks, loss: str) -> None:
    """Warn of hooks that are not installed. loss: consequence, for the log."""
    if names := missing(hooks):
        logger.warning("kvtier's hooks are not installed: %s; %s", ", ".join(names), loss)


def missing(hooks: Hooks) -> list[str]:
    """Return the names of hooks that are not installed."""
    return [name for name, hook in hooks.items() if not _has_taken(name, hook)]


def _has_taken(name: str, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is installed at ``name``: SGLang keeps it in a closure of the wrapper."""
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError):
        return False
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if any(callable(cell.cell_contents) and cell.cell_contents == hook for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
