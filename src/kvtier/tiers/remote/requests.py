"""Asynchronous requests in a background thread, with deadlines and a concurrency limit."""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

from kvtier.core.errors import Closed

Result = TypeVar("Result")
Request = Callable[[], Coroutine[Any, Any, Result]]
"""Begins a request when called."""

EXIT_S: Final = 1.0
SETTLE_S: Final = 0.1
"""Time for a client's own threads to leave the interpreter: they hand over a result, or notice that
their request was cancelled."""


@cache
def settle_at_exit() -> None:
    """Wait at interpreter exit, after all loops have ended, until a client's threads have left it.

    A thread of another language that enters the interpreter later aborts the process.
    """
    atexit.register(time.sleep, SETTLE_S)


class RequestLoop:
    """A thread with an event loop.

    A request is cancelled, and its connection closed, when its caller's time limit has passed. At
    exit of the process all requests are cancelled and no new one begins.

    num_at_once: maximum requests of one call that are in flight, or done and not yet consumed.
    """

    def __init__(self, name: str, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._is_ending = False
        settle_at_exit()
        atexit.register(self._end)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def begin(self, request: Request[Result]) -> Future[Result]:
        """Run a request in the background. Raises ``Closed`` if the loop was closed."""
        if self._is_ending:
            never: Future[Result] = Future()
            never.cancel()
            return never
        coroutine = request()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise Closed("this tier was closed; make a new one") from None

    def run(self, request: Request[Result], timeout_s: float) -> Result:
        """Return the result of a request, or raise its exception.

        Raises ``TimeoutError`` after the deadline.
        """
        future = self.begin(request)
        try:
            return future.result(max(0.0, timeout_s))
        except CancelledError:
            raise TimeoutError("it was cancelled") from None
        finally:
            future.cancel()

    def each(
        self, requests: Sequence[Request[Result]], end_s: float
    ) -> Iterator[tuple[int, Result | BaseException]]:
        """Yield the position and the result or exception of each request, in order of completion.

        Requests that have not ended by ``end_s`` (``time.monotonic``) are cancelled and not
        yielded; closing the iterator cancels all. A yielded result is not retained.
        """
        ended: SimpleQueue[int] = SimpleQueue()
        running: dict[int, Future[Result]] = {}
        next_one = 0
        try:
            while next_one < len(requests) or running:
                while next_one < len(requests) and len(running) < self._num_at_once:
                    if time.monotonic() >= end_s:
                        return
                    running[next_one] = self.begin(requests[next_one])
                    running[next_one].add_done_callback(lambda _, at=next_one: ended.put(at))  # type: ignore[misc]
                    next_one += 1
                try:
                    at = ended.get(timeout=max(0.0, end_s - time.monotonic()))
                except Empty:
                    return
                yield at, _ending(running.pop(at))
        finally:
            for future in running.values():
                future.cancel()

    def close(self, timeout_s: float) -> None:
        """Cancel all requests and end the thread."""

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        atexit.unregister(self._end)
        if self._loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(cancel_all(), self._loop)
        try:
            ending.result(timeout_s)
        except TimeoutError:
            ending.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _end(self) -> None:
        """Close at interpreter exit, if that was not done before."""
        self._is_ending = True
        self.close(EXIT_S)


def _ending(done: Future[Any]) -> Any:
    """Return the result or the exception."""
    error = CancelledError() if done.cancelled() else done.exception()
    return done.result() if error is None else error
