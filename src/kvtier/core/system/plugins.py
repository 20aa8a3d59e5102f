"""Find tiers, devices and policies by entry point.

kvtier's own tiers and devices are registered the same way; its policies are named in
``kvtier.index.policies.replayed``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from kvtier.core.errors import ConfigError


@cache
def installed_plugins(group: str) -> EntryPoints:
    """Return the entry points of ``kvtier.<group>``.

    They are read once in a process: reading opens a file of every installed package.
    """
    return entry_points(group=f"kvtier.{group}")


def known_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of ``kvtier.<group>``, by name.

    group: "codecs", "devices", "tiers" or "policies".
    """
    return {entry.name: entry for entry in installed_plugins(group)}


def find_plugin(group: str, name: str) -> EntryPoint:
    """Return entry point ``name`` of ``kvtier.<group>``; raise ``ConfigError`` if there is none."""
    known = known_plugins(group)
    if name not in known:
        raise ConfigError(
            f"no plug-in {name!r} in kvtier.{group}; known: {', '.join(sorted(known)) or 'none'}. "
            "Install the package that brings it"
        )
    return known[name]


def load_plugin(group: str, name: str) -> Callable[..., object]:
    """Return the class that entry point ``name`` of ``kvtier.<group>`` refers to."""
    made: Callable[..., object] = find_plugin(group, name).load()
    return made
