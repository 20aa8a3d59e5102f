"""Repeated scrapes of an engine's ``/metrics`` over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from kvtier.core.errors import CacheError
from kvtier.observe.live.client import (
    MAX_BYTES,
    NoAnswerError,
    RefusedError,
    UnixConnection,
    check_url,
    fetch,
)
from kvtier.observe.live.history import History
from kvtier.observe.live.reading import Reading, UnreadableError

TIMEOUT_S = 5.0
LEAST_PAUSE_S = 0.8
"""Least time between two scrapes, however many clients look."""


class ScrapeError(CacheError):
    """The metrics could not be read. The message says why, without quoting the answer."""


def metrics_url(url: str) -> str:
    """Return the URL of an engine's metrics, from ``http://host:port`` or ``host:port``.

    Raises ``ConfigError`` for anything else.
    """
    whole = check_url(url)
    parts = urlsplit(whole)
    if parts.path in ("", "/"):
        return f"{parts.scheme}://{parts.netloc}/metrics"
    return whole


def read_socket(path: Path) -> str:
    """Return the text of the metrics that a node serves on its control socket.

    Raises ``ScrapeError`` if it can't be read.
    """
    connection = UnixConnection(path, TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        content = answer.read(MAX_BYTES)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ScrapeError(f"{path} does not answer: {reason}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise ScrapeError(f"{path} answers {answer.status}")
    return content.decode(errors="replace")


def read_text(url: str, api_key: str | None = None) -> str:
    """Return the text of the metrics. Raise ``ScrapeError`` if it can't be read."""
    try:
        content = fetch(url, TIMEOUT_S, {"Accept": "text/plain"}, api_key=api_key)
    except RefusedError as error:
        hint = {401: "it wants an API key", 403: "it wants another key", 404: "it has no metrics"}
        raise ScrapeError(f"{error}: {hint.get(error.code, 'it refuses')}") from None
    except NoAnswerError as error:
        raise ScrapeError(str(error)) from None
    return content.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ScrapeResult:
    """Result of a scrape: a picture as plain data, or the reason why there is none."""

    picture: dict[str, Any] | None
    error: str = ""


class WatchedEngine:
    """A watched engine or node. Several threads may look; they share one scrape.

    Args:
        url: its address, for display.
        read: returns its metrics as text; raises ``ScrapeError``.
    """

    def __init__(self, url: str, read: Callable[[], str]) -> None:
        self.url = url
        self._read = read
        self._lock = Lock()
        self._history = History()
        self._looked_s: float | None = None
        self._seen = ScrapeResult(None)

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> WatchedEngine:
        """Return a watched engine by its address. Raises ``ConfigError`` if it is none."""
        whole = metrics_url(url)
        return cls(whole, lambda: read_text(whole, api_key))

    @classmethod
    def at_socket(cls, control_socket: Path) -> WatchedEngine:
        """Return a watched node by the path of its control socket."""
        return cls(str(control_socket), lambda: read_socket(control_socket))

    def look(self) -> ScrapeResult:
        """Return the current picture, at most ``LEAST_PAUSE_S`` old.

        Waits up to ``TIMEOUT_S`` for the engine.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._looked_s is None or now_s - self._looked_s >= LEAST_PAUSE_S:
                self._seen = self._look()
                self._looked_s = time.monotonic()
            return self._seen

    def hour(self) -> dict[str, Any]:
        """Return the last hour of the charts; see ``ChartHour``."""
        with self._lock:
            return self._history.hour(time.monotonic())

    def _look(self) -> ScrapeResult:
        try:
            picture = self._history.look(Reading.parse(self._read(), time.monotonic()))
        except UnreadableError as error:
            return ScrapeResult(None, f"{self.url} answers, but with {error}")
        except ScrapeError as error:
            return ScrapeResult(None, str(error))
        return ScrapeResult(picture)
