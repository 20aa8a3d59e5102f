"""Runs a command of kvtier as if only one extra were installed.

    python -m tests.docs.only_extra s3 remote check s3://bucket

Modules of installed packages that neither kvtier nor the extra requires cannot be imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(package: str, extra: str) -> set[str]:
    """Return the packages that ``package[extra]`` brings, with what these require."""
    found: set[str] = set()
    waiting = [(package, {extra, ""})]
    while waiting:
        name, extras = waiting.pop()
        found.add(canonicalize_name(name))
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # not for this system, or a test will miss it
        for each in needed:
            is_asked = each.marker is None or any(
                each.marker.evaluate({"extra": asked}) for asked in extras
            )
            if is_asked and canonicalize_name(each.name) not in found:
                waiting.append((each.name, each.extras | {""}))
    return found


class Hiding:
    """A finder of modules that finds none of ``hidden``."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in self._hidden:
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, *where)
        return found


def hide_all_but(packages: set[str]) -> None:
    """Hide the modules of all other installed packages."""
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not packages & set(map(canonicalize_name, owners))
    } - {"tests"}
    for name in list(sys.modules):
        if name.partition(".")[0] in hidden:
            del sys.modules[name]
    sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]


def main(extra: str, *arguments: str) -> None:
    hide_all_but(required("kvtier", extra))
    if arguments[:1] == ("-c",):
        exec(arguments[1], {"__name__": "__main__"})
        return
    from kvtier.tools.cli import app

    sys.argv = ["kvtier", *arguments]
    app()


if __name__ == "__main__":
    main(*sys.argv[1:])
