"""Files of the live page, and the headers that restrict the browser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

PAGE = "index.html"
LIVE_PATH = "/kvtier/live.json"
HOUR_QUERY = "hour=1"
"""Query by which a page also gets the last hour of its charts."""
FOLDER = "/kvtier/page/"
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript; charset=utf-8",
    "words.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "ladder.js": "text/javascript; charset=utf-8",
    "memory.js": "text/javascript; charset=utf-8",
    "node.js": "text/javascript; charset=utf-8",
}
"""Content types of the page's files. No other file is served."""
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
"""Headers of all answers: no resources of other origins, no inline code, no framing."""


def name_of(path: str) -> str | None:
    """Return the name of the file at a path; None if there is none."""
    if path == "/":
        return PAGE
    name = path.removeprefix(FOLDER)
    return name if path.startswith(FOLDER) and name in TYPES else None


@cache
def content_of(name: str) -> bytes:
    """Return a file's content. It is read once."""
    return (files("kvtier.observe.live") / "page" / name).read_bytes()
