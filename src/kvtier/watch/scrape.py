"""An engine's ``/metrics``, read over HTTP again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from kvtier.errors import CacheError, ConfigError
from kvtier.watch.history import History
from kvtier.watch.reading import Reading, UnreadableError

TIMEOUT_S = 5.0
MOST_BYTES = 16 << 20
LEAST_PAUSE_S = 0.8
"""However many look, the engine is asked no more often."""


class ScrapeError(CacheError):
    """The engine did not say how it is. The text says why, without what it sent."""


def metrics_url(url: str) -> str:
    """Where an engine's metrics are: ``http://host:port`` may do, and ``host:port``. Raises
    ``ConfigError`` for what is no such address."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"URL: {url!r} is no address of a server; give http://host:port")
    if parts.path in ("", "/"):
        return f"{parts.scheme}://{parts.netloc}/metrics"
    return whole


class _NoRedirects(HTTPRedirectHandler):
    """A key is for the server that was named, and for no other."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_open = build_opener(_NoRedirects).open


def read_text(url: str, api_key: str | None = None) -> str:
    """The metrics' text. Raises ``ScrapeError``."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    headers["Accept"] = "text/plain"
    try:
        with _open(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except HTTPError as error:
        error.close()
        hint = {401: "it wants an API key", 403: "it wants another key", 404: "it has no metrics"}
        why = hint.get(error.code, "it refuses")
        raise ScrapeError(f"{url} answers {error.code}: {why}") from None
    except (OSError, ValueError) as error:
        raise ScrapeError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    if len(content) > MOST_BYTES:
        raise ScrapeError(f"{url} tells more than {MOST_BYTES >> 20} MiB of metrics")
    return content.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look came to: a picture as plain data, or why there is none."""

    picture: dict[str, Any] | None
    error: str = ""


class Watched:
    """An engine somewhere, looked at by several threads; it is asked once for all of them."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = metrics_url(url)
        self._api_key = api_key
        self._lock = Lock()
        self._history = History()
        self._looked_s: float | None = None
        self._seen = Seen(None)

    def look(self) -> Seen:
        """As it is now, or was a moment ago. Waits for the engine, for some seconds at most."""
        with self._lock:
            now_s = time.monotonic()
            if self._looked_s is None or now_s - self._looked_s >= LEAST_PAUSE_S:
                self._seen = self._look()
                self._looked_s = time.monotonic()
            return self._seen

    def _look(self) -> Seen:
        try:
            text = read_text(self.url, self._api_key)
            self._history.add(Reading.parse(text, time.monotonic()))
        except UnreadableError:
            return Seen(None, f"{self.url} answers, but with no Prometheus metrics")
        except ScrapeError as error:
            return Seen(None, str(error))
        return Seen(self._history.picture().as_json())
