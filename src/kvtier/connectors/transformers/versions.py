"""Versions of transformers and torch that the tests ran with; others are warned about once."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kvtier.connectors.common.contract import Contract

logger = logging.getLogger(__name__)

TESTED = {
    name: Contract(name, name, oldest, newest, run_with=(), files=())
    for name, oldest, newest in (("torch", "2.11", "2.15"), ("transformers", "5.20", "5.24"))
}


def untested(name: str) -> str:
    """Return a sentence if a package's installed version is outside the tested range, else ""."""
    if name not in TESTED:
        return ""
    try:
        found = version(name)
    except PackageNotFoundError:
        return ""
    if TESTED[name].covers(found):
        return ""
    oldest, newest = TESTED[name].oldest, TESTED[name].newest
    known = oldest if oldest == newest else f"{oldest} to {newest}"
    return (
        f"kvtier was tested with {name} {known}, not with {found}: models are checked when they "
        "are loaded or attached, and what does not fit is refused with a reason"
    )


@cache
def warn_of_untested() -> None:
    """Log a warning for each package of an untested version, once in a process."""
    for sentence in filter(None, map(untested, TESTED)):
        logger.warning("%s", sentence)
