"""A cache for programs without a loop of their own: any thread may call it, and nobody polls."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread

from kvtier.cache import Cache
from kvtier.errors import Closed
from kvtier.prompts.lease import Lease
from kvtier.system.process import OwnerProcess
from kvtier.types import Label

POLL_S = 0.0005
"""Time between two polls of a ``SharedCache`` while somebody waits for a copy."""
BUSY_POLL_S = 0.005
"""The same, while copies are in flight and nobody waits for them."""
IDLE_POLL_S = 0.5
"""The same, while nothing is in flight: upkeep only, such as verification of an idle disk."""


class SharedCache:
    """A cache that all threads of a process share, and that needs no ``poll``.

    A thread notices the ends of copies and writes what is due to storage, so computed blocks become
    durable while no request runs. ``call`` reaches the other methods of the cache.

    Args:
        cache: the cache. Only this object calls it from now on, and closes it.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._condition = Condition()
        self._process = OwnerProcess()
        self._closed = False
        self._thread = Thread(target=self._keep_polling, name="kvtier-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before the threads that copy end with the interpreter

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and this is not a forked child of its process."""
        return not self._closed and self._process.is_here

    def fetch(
        self, namespace: bytes, labels: Sequence[Label], num_tokens: int, num_blocks: int
    ) -> Lease | None:
        """Reuse the cached prefix of a prompt, reserve slots for the rest, and wait for the copies.

        See ``Cache.fetch`` for the arguments.

        Returns:
            A lease that is ready. None if there is no room, or if a copy failed or took longer than
            ``load_deadline_s``: compute the prompt then.

        Raises:
            Closed: after ``close``, and in a forked child.
        """
        with self._open() as cache:
            ends = time.monotonic() + cache.config.lookup_deadline_s
            while cache.begin_lookup(namespace, labels) and time.monotonic() < ends:
                self._wait(POLL_S)
            lease = cache.fetch(namespace, labels, num_tokens, num_blocks)
            while lease is not None and not lease.ready:
                self._wait(POLL_S)
            if lease is not None and lease.broken:
                cache.release(lease)
                return None
            return lease

    def finish(self, lease: Lease, num_blocks: int) -> None:
        """Add the blocks that were computed to the cache, and end the lease.

        num_blocks: full blocks, counted from the start of the prompt; 0 to add none.
        """
        with self._open() as cache:
            if num_blocks > lease.num_shared:
                cache.commit(lease, num_blocks)
            cache.release(lease)
            self._condition.notify_all()  # there may be copies to store

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Report to the planner that a piece of prefill took ``seconds``."""
        with self._open() as cache:
            cache.observe_prefill(num_before, num_tokens, seconds)

    def call(self, function: Callable[[Cache], None]) -> None:
        """Call ``function`` with the cache, while no other thread uses it."""
        with self._open() as cache:
            function(cache)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything that is due is in storage. Return False after ``timeout_s``."""
        with self._open() as cache:
            ends = time.monotonic() + timeout_s
            while cache.is_busy:
                if time.monotonic() > ends:
                    return False
                self._wait(POLL_S)
            return True

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush, and close the cache. Safe to call twice; does nothing in a forked child."""
        if not self.is_usable:
            return
        self.flush(timeout_s)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        self._cache.close()

    @contextmanager
    def _open(self) -> Iterator[Cache]:
        self._process.must_be_here("the cache")  # first: the lock may be held for ever in a child
        with self._condition:
            if self._closed:
                raise Closed("the cache is closed; make a new one")
            yield self._cache

    def _wait(self, seconds: float) -> None:
        """Let other threads use the cache for ``seconds``, then poll."""
        self._condition.wait(seconds)
        if self._closed:
            raise Closed("the cache was closed meanwhile")
        self._cache.poll()

    def _keep_polling(self) -> None:
        with self._condition:
            while not self._closed:
                self._cache.poll()
                self._condition.wait(BUSY_POLL_S if self._cache.is_busy else IDLE_POLL_S)
