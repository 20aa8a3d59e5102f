"""A real Chromium, if one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def why_not() -> str:
    """Return what is missing for a browser; "" if nothing is."""
    if program() is None:
        return "no Chromium on this machine: make test-page installs one"
    if find_spec("playwright") is None:
        return "no package playwright: make test-page installs it"
    return ""


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        made = started.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        try:
            yield made
        finally:
            made.close()
