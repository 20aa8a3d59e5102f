"""Pass on hints of requests and their senders to the cache at the right moments."""

from __future__ import annotations

from collections import deque

from kvtier.cache import Cache
from kvtier.engine.request import Request, Stage


class Hints:
    """Each request is told of once when it begins to wait, and once when it waits no more.

    Nothing is done in between, however many wait.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._new: deque[Request] = deque()

    def came(self, request: Request) -> None:
        """A request stands in line. Its turn may come in this very step."""
        self._new.append(request)

    def tell_who_waits(self) -> None:
        """All that came since the last call and had no turn."""
        while self._new:
            request = self._new.popleft()
            if request.stage is Stage.WAITING:
                self._wait(request, True)

    def begins(self, request: Request) -> None:
        """Its turn has come, and the cache knows its prompt."""
        self._wait(request, False)
        if request.hint is not None:
            self._cache.hint(request.namespace, request.labels, request.hint.at_begin)

    def ends(self, request: Request) -> None:
        """Before its lease is given back, so that it counts for what is stored then."""
        self.goes(request)
        if request.hint is not None and request.lease is not None:
            self._cache.hint(request.namespace, request.labels, request.hint.at_end)

    def goes(self, request: Request) -> None:
        """It waits no more under this name."""
        self._wait(request, False)

    def _wait(self, request: Request, is_waiting: bool) -> None:
        if request.is_waited_for != is_waiting and request.labels:
            request.is_waited_for = is_waiting
            self._cache.wait(request.namespace, request.labels, is_waiting)
