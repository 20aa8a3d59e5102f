"""Passes hints of requests on to the cache at the right moments."""

from __future__ import annotations

from collections import deque

from kvtier.cache.tokens import Cache
from kvtier.serve.engine.request import Request, Stage


class Hints:
    """Tells the cache once when a request begins to wait and once when it stops.

    Waiting itself costs nothing.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._new: deque[Request] = deque()

    def came(self, request: Request) -> None:
        """Note a queued request, which may be scheduled in this very step."""
        self._new.append(request)

    def tell_who_waits(self) -> None:
        """Report the requests that were queued since the last call and are still waiting."""
        while self._new:
            request = self._new.popleft()
            if request.stage is Stage.WAITING:
                self._wait(request, True)

    def begins(self, request: Request) -> None:
        """Note that a request was scheduled and the cache has its prompt."""
        self._wait(request, False)
        if request.hint is not None:
            self._cache.hint(request.namespace, request.labels, request.hint.at_begin)

    def ends(self, request: Request) -> None:
        """Note that a request ends, before its lease is released: hints affect its stores."""
        self.goes(request)
        if request.hint is not None and request.lease is not None:
            self._cache.hint(request.namespace, request.labels, request.hint.at_end)

    def goes(self, request: Request) -> None:
        """Note that a request no longer waits under its namespace."""
        self._wait(request, False)

    def _wait(self, request: Request, is_waiting: bool) -> None:
        if request.is_waited_for != is_waiting and request.labels:
            request.is_waited_for = is_waiting
            self._cache.wait(request.namespace, request.labels, is_waiting)
