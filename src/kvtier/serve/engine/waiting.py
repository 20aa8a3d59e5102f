"""Waiting requests: queued, or set aside while storage is read for them; and their hints."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from kvtier.cache.tokens import Cache
from kvtier.core.hints import Hint
from kvtier.core.types import PrefetchPolicy
from kvtier.serve.engine.request import Request, Stage, Turn

NUM_LOOKS = 16
"""Requests waiting for storage that are checked per step."""

PATIENCE = 4
"""Limit of a prompt's wait for later ones, in multiples of its own length."""


class RequestLine:
    """Waiting requests, the lowest turn first.

    In order of arrival a short prompt would wait for all long ones before it. Shortest first has
    the best mean, but a long prompt may starve. Sharing every step among all makes every request as
    late as the last. So a prompt's turn is

        tokens to compute before it, had all been served in order of arrival
        + PATIENCE * tokens to compute of its own

    The lowest turn comes first, and is computed to its end unless a lower one arrives. A short
    prompt passes the long ones just before it. A long one is delayed, compared to the order of
    arrival, only by what arrives within ``PATIENCE`` times its own length after it. Prompts of
    equal length keep the order of arrival.

    A turn never changes, so a waiting request costs nothing.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_tokens = 0
        self._num_requests = 0

    def next_turn(self, num_tokens: int) -> Turn:
        """Return the turn of a request that is queued now, with so many tokens to compute."""
        return self._num_tokens + PATIENCE * num_tokens, self._num_requests

    def join(self, request: Request, num_tokens: int) -> None:
        """Queue a new request. num_tokens: of its prompt that have to be computed."""
        request.turn = self.next_turn(num_tokens)
        self._num_tokens += num_tokens
        self._num_requests += 1
        self.rejoin(request)

    def rejoin(self, request: Request) -> None:
        """Return a request to its place."""
        insort(self._requests, request, key=_turn)

    def leave(self, request: Request) -> bool:
        """Remove a request. Return False if it was not queued."""
        at = bisect_left(self._requests, request.turn, key=_turn)
        if at == len(self._requests) or self._requests[at] is not request:
            return False
        del self._requests[at]
        return True

    @property
    def first(self) -> Request:
        return self._requests[0]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def _turn(request: Request) -> Turn:
    return request.turn


class WaitingRequests:
    """Waiting requests, and prefetches from storage for them.

    A request that has to wait for storage lets others pass, and returns to its place later.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._line = RequestLine()
        self._reading: deque[Request] = deque()  # set aside while storage is read for them
        self._unread: deque[Request] = deque()  # not prefetched yet
        self.next_turn = self._line.next_turn

    def __len__(self) -> int:
        return len(self._line) + len(self._reading)

    def __iter__(self) -> Iterator[Request]:
        yield from (*self._line, *self._reading)

    def join(self, request: Request, num_tokens: int) -> None:
        """Queue a new request. num_tokens: of its prompt that have to be computed."""
        self._line.join(request, num_tokens)
        self._unread.append(request)

    def rejoin(self, request: Request) -> None:
        """Return a scheduled request that found no room."""
        self._line.rejoin(request)
        self._unread.appendleft(request)

    def leave(self, request: Request) -> None:
        """Remove a request that runs now or has ended."""
        if not self._line.leave(request) and request in self._reading:
            self._reading.remove(request)

    def whose_turn(self) -> Request | None:
        """Return the next request. Those before it that wait for storage are set aside."""
        while self._line:
            request = self._line.first
            if not self._waits_for_storage(request):
                return request
            self._line.leave(request)
            self._reading.append(request)
        return None

    def look_at_storage(self) -> None:
        """Return requests that no longer wait for storage to the queue.

        Each step checks some of them, in turn.
        """
        for _ in range(min(NUM_LOOKS, len(self._reading))):
            request = self._reading.popleft()
            if self._waits_for_storage(request):
                self._reading.append(request)
            else:
                self._line.rejoin(request)

    def read_ahead(self) -> None:
        """Start prefetches for new requests, as far as there is room."""
        while self._unread and self._prefetch(self._unread[0]):
            self._unread.popleft()

    def end_prefetch(self, request: Request) -> None:
        """Release the prefetched blocks of a request."""
        if request.prefetch is not None:
            self._cache.end_prefetch(request.prefetch)
            request.prefetch = None

    def _waits_for_storage(self, request: Request) -> bool:
        may_load = request.may_load and request.labels
        if may_load and self._cache.lookup(request.namespace, request.labels):
            return True
        if self._cache.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self._prefetch(request)
        return request.prefetch is not None and self._cache.is_worth_waiting(request.prefetch)

    def _prefetch(self, request: Request) -> bool:
        """Start a waiting request's prefetch, once. Return False if there is no room for it now."""
        waits = request.stage is Stage.WAITING
        if waits and request.prefetch is None and request.may_load and request.labels:
            request.prefetch = self._cache.prefetch(request.namespace, request.labels)
            return request.prefetch is not None
        return True


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
        request.hint_results.clear()  # it may begin anew
        if request.hint is not None:
            self._apply(request, request.hint.at_begin)

    def ends(self, request: Request) -> None:
        """Note that a request ends, before its lease is released: hints affect its stores."""
        self.goes(request)
        if request.hint is not None:
            self._apply(request, request.hint.at_end)

    def has_ended(self, request: Request) -> None:
        """Note that the lease of a request was released: hints may move its blocks."""
        if request.hint is not None:
            self._apply(request, request.hint.after_end)

    def _apply(self, request: Request, hint: Hint) -> None:
        request.hint_results += self._cache.hint(request.namespace, request.labels, hint)

    def goes(self, request: Request) -> None:
        """Note that a request no longer waits under its namespace."""
        self._wait(request, False)

    def _wait(self, request: Request, is_waiting: bool) -> None:
        if request.is_waited_for != is_waiting and request.labels:
            request.is_waited_for = is_waiting
            self._cache.wait(request.namespace, request.labels, is_waiting)
