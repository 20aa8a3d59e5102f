"""Requests whose turn has not come: in line, or out of it while storage is read for them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from kvtier.cache import Cache
from kvtier.engine.request import Request, Stage, Turn
from kvtier.types import PrefetchPolicy

NUM_LOOKS = 16
"""Requests that wait for storage and are asked in one step whether they still have to."""

PATIENCE = 4
"""Limit of a prompt's wait for later ones, in multiples of its own length."""


class RequestLine:
    """Waiting requests, the lowest turn first.

    In the order of arrival a short prompt would stand behind long ones for as long as all of these
    take. Shortest first gives the best mean, but a long prompt may wait for ever. Sharing every
    step among all that wait makes everybody as late as the last. So a prompt's turn is

        tokens to compute before it, had all been served as they came
        + PATIENCE * tokens to compute of its own

    The lowest comes first, and is computed to its end unless a lower one comes. A short prompt
    passes the long ones just before it. A long one waits longer than in the order of arrival by
    what comes within ``PATIENCE`` times its own length after it, and no longer. Among prompts of
    one length that is the order of arrival.

    A turn is given once and never changes, so a request costs nothing while it waits.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_tokens = 0
        self._num_requests = 0

    def join(self, request: Request, num_tokens: int) -> None:
        """A new request comes. num_tokens: of its prompt, as far as they have to be computed."""
        request.turn = (self._num_tokens + PATIENCE * num_tokens, self._num_requests)
        self._num_tokens += num_tokens
        self._num_requests += 1
        self.rejoin(request)

    def rejoin(self, request: Request) -> None:
        """One that had left comes back to its place."""
        insort(self._requests, request, key=_turn)

    def leave(self, request: Request) -> bool:
        """Its turn has come, or it has gone. False where it was not in line."""
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
    """Waiting requests, and their blocks that are being read from storage meanwhile.

    Who has to wait for storage lets others pass, and comes back to its place in line.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._line = RequestLine()
        self._reading: deque[Request] = deque()  # out of line as long as storage is read for them
        self._unread: deque[Request] = deque()  # storage was not asked for them yet

    def __len__(self) -> int:
        return len(self._line) + len(self._reading)

    def __iter__(self) -> Iterator[Request]:
        yield from (*self._line, *self._reading)

    def join(self, request: Request, num_tokens: int) -> None:
        """A new request comes. num_tokens: of its prompt, as far as they have to be computed."""
        self._line.join(request, num_tokens)
        self._unread.append(request)

    def rejoin(self, request: Request) -> None:
        """One whose turn had come found no room after all."""
        self._line.rejoin(request)
        self._unread.appendleft(request)

    def leave(self, request: Request) -> None:
        """It runs now, or it has gone."""
        if not self._line.leave(request) and request in self._reading:
            self._reading.remove(request)

    def whose_turn(self) -> Request | None:
        """The first in line. Those before it that have to wait for storage are out of line now."""
        while self._line:
            request = self._line.first
            if not self._waits_for_storage(request):
                return request
            self._line.leave(request)
            self._reading.append(request)
        return None

    def look_at_storage(self) -> None:
        """Return requests that need not wait for storage any more to the line.

        Some of them are checked in each step, in turn.
        """
        for _ in range(min(NUM_LOOKS, len(self._reading))):
            request = self._reading.popleft()
            if self._waits_for_storage(request):
                self._reading.append(request)
            else:
                self._line.rejoin(request)

    def read_ahead(self) -> None:
        """Have storage read for those who came, as far as there is room."""
        while self._unread and self._prefetch(self._unread[0]):
            self._unread.popleft()

    def end_prefetch(self, request: Request) -> None:
        """Release what was read for a request."""
        if request.prefetch is not None:
            self._cache.end_prefetch(request.prefetch)
            request.prefetch = None

    def _waits_for_storage(self, request: Request) -> bool:
        may_load = request.may_load and request.labels
        if may_load and self._cache.begin_lookup(request.namespace, request.labels):
            return True
        if self._cache.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self._prefetch(request)
        return request.prefetch is not None and self._cache.is_worth_waiting(request.prefetch)

    def _prefetch(self, request: Request) -> bool:
        """Have storage read for a waiting request, once. False when there is no room for it now."""
        waits = request.stage is Stage.WAITING
        if waits and request.prefetch is None and request.may_load and request.labels:
            request.prefetch = self._cache.prefetch(request.namespace, request.labels)
            return request.prefetch is not None
        return True
