"""Report requests that join SGLang's queue to a storage back end whose policy learns.

A hook around ``prefetch_from_storage`` notes each request on the scheduler's thread. The storage's
own threads compute the keys of its pages and report them, before they store pages that could evict
others.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang.shared.contract import TELLING
from kvtier.connectors.sglang.shared.identity import page_keys
from kvtier.connectors.sglang.shared.prompt_reporting import keys_up_to

logger = logging.getLogger(__name__)

TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
MAX_NOTED = 4096
"""Most requests remembered: those reported lately, and those not reported yet."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that joined the queue.

    Attributes:
        before: keys of the prompt's pages that SGLang has cached.
        rest: the prompt's tokens behind these, as SGLang's ``RadixKey``.
        last: key of the last cached page; None if there is none.
    """

    before: Sequence[str]
    rest: Any
    last: str | None

    def keys(self, page_size: int) -> list[bytes]:
        """Return the keys of all whole pages of the prompt, from its beginning."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        rest = self.rest.page_aligned(page_size)
        behind = get_storage_hash_str(rest, self.last, page_size=page_size) if len(rest) else []
        return page_keys([*self.before, *behind])


class PrefetchWatch:
    """Reports requests that join the queue, on the scheduler's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[QueuedRequest], object]] = []
        self._known: OrderedDict[str, int] = OrderedDict()  # requests: tokens of each

    def listen(self, joined: Callable[[QueuedRequest], object]) -> None:
        """Add a listener, called once per request. It must neither raise nor wait."""
        self._listeners.append(joined)

    def leave(self, joined: Callable[[QueuedRequest], object]) -> None:
        """Remove a listener."""
        self._listeners.remove(joined)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return hooks around SGLang functions, by full name.

        Each hook gets the original function first.
        """
        return {f"{TREE}.prefetch_from_storage": self._prefetch}

    def _prefetch(
        self,
        prefetch: Callable[..., Any],
        tree: Any,
        request: Any,
        node: Any,
        tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        **more: Any,
    ) -> Any:
        if self._listeners:
            try:
                self._note(tree, request, node, tokens, prefix_keys, **more)
            except Exception:
                logger.exception("kvtier: a request was not reported to the eviction policy")
        return prefetch(tree, request, node, tokens, last_hash, prefix_keys, **more)

    def _note(
        self,
        tree: Any,
        request: Any,
        node: Any,
        tokens: Sequence[int],
        prefix_keys: Sequence[str] | None,
        *,
        matched_prefix_tokens: Sequence[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **_: Any,
    ) -> None:
        num_before = len(matched_prefix_tokens or ())
        num_tokens = num_before + len(tokens)
        if request.attempt_id or self._known.get(request.rid) == num_tokens:
            return  # a repeated call for the same request
        before = keys_up_to(tree, node, prefix_keys) if num_before else ()
        if len(before) != num_before // tree.page_size:
            return  # some cached pages are not hashed yet
        self._known[request.rid] = num_tokens
        self._known.move_to_end(request.rid)
        while len(self._known) > MAX_NOTED:
            self._known.popitem(last=False)
        from sglang.srt.mem_cache.radix_cache import RadixKey

        is_bigram = tree.tree_core.is_eagle
        rest = RadixKey(tokens, extra_key, is_bigram=is_bigram, cache_salt=cache_salt)
        joined = QueuedRequest(before, rest, before[-1] if before else None)
        for listener in self._listeners:
            listener(joined)


class RequestReports:
    """Queue of requests to report. The scheduler calls ``note``, any thread calls ``tell``.

    asked: called with the keys of each request's pages. page_size: tokens per page.
    """

    def __init__(self, asked: Callable[[list[bytes]], object], page_size: int) -> None:
        self._asked = asked
        self._page_size = page_size
        self._noted: deque[QueuedRequest] = deque(maxlen=MAX_NOTED)

    def note(self, joined: QueuedRequest) -> None:
        """Queue a request. Constant time, whatever the length of its prompt."""
        self._noted.append(joined)

    def tell(self) -> None:
        """Report all queued requests."""
        while self._noted:
            try:
                joined = self._noted.popleft()
            except IndexError:  # another thread was faster
                return
            if keys := joined.keys(self._page_size):
                self._asked(keys)


def reporting_hooks() -> dict[str, Callable[..., Any]]:
    """Return the hooks that report requests; none for an unknown SGLang."""
    return {} if TELLING.differences() else PREFETCHES.hooks()


PREFETCHES = PrefetchWatch()
"""The instance of this process: a scheduler has one tree."""
