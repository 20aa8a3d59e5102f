"""Requests that wait for their turn.

Whose turn it is. First come, first served lets a short prompt stand behind long ones for as long as
all of these take. Shortest first gives the best mean, but a long prompt may wait for ever, and
sharing every step among all that wait makes everybody as late as the last. So a prompt's turn is

    tokens to compute before it, had all been served as they came
    + PATIENCE * tokens to compute of its own

and the lowest comes first, and is computed to its end unless a lower one comes. A short prompt
passes the long ones just before it. A long one waits longer than it would in the order of arrival
by what comes within ``PATIENCE`` times its own length after it, and no longer: whoever came later
than that is behind it. Among prompts of one length that is the order of arrival.

A turn is given once and never changes, so a request costs nothing while it waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvtier.engine.request import Request, Turn

PATIENCE = 4
"""What a prompt may wait for those that came after it, in multiples of its own length."""


class RequestLine:
    """Waiting requests, the lowest turn first."""

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
