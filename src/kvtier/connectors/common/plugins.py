"""Code from outside an engine that its plug-ins bring."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points

OWN = "kvtier"


def plugin_modules(group: str, allowed: Collection[str] | None = None) -> list[str]:
    """Return the modules of an engine's plug-ins, without kvtier's own.

    allowed: names of the plug-ins that the engine loads; None for all.
    """
    return sorted(
        entry_point.module
        for entry_point in entry_points(group=group)
        if entry_point.module.partition(".")[0] != OWN
        and (allowed is None or entry_point.name in allowed)
    )
