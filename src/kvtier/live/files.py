"""The page's files, and what a browser is allowed to do with them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

PAGE = "index.html"
LIVE_PATH = "/kvtier/live.json"
FOLDER = "/kvtier/page/"
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript; charset=utf-8",
    "words.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "ladder.js": "text/javascript; charset=utf-8",
}
"""All that there are: a path names one of these, or nothing."""
PATHS = frozenset({"/", LIVE_PATH, *(FOLDER + name for name in TYPES)})
"""Paths that a browser requests to show the page."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Nothing from elsewhere, nothing inline, in nobody's frame."""


def name_of(path: str) -> str | None:
    """Return the file that a path names; None for none."""
    if path == "/":
        return PAGE
    name = path.removeprefix(FOLDER)
    return name if path.startswith(FOLDER) and name in TYPES else None


@cache
def content_of(name: str) -> bytes:
    """A file's content, read once."""
    return (files("kvtier.live") / "page" / name).read_bytes()
