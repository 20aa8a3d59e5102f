"""Report each request once, with all pages of its prompt, to a policy that learns.

SGLang looks a prompt up from the end of its own cache. The keys of the pages before are taken from
its tree, which has them already. Requests are noticed in:

    linker    the tree's look-ups, also those of prompts that are fully on the device (hooks in
              ``scheduler_hooks.py``)
    storage   ``prefetch_from_storage``, which is called for every request that joins the queue. The
              scheduler's thread only notes it. The storage's own threads compute the keys of its
              pages and report them, before they store pages that could evict others
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.cache.block_cache import BlockCache
from kvtier.connectors.common.settings import StoreSettings
from kvtier.connectors.sglang.shared.contract import TELLING
from kvtier.connectors.sglang.shared.hooks import Hooks, missing
from kvtier.connectors.sglang.shared.identity import page_keys
from kvtier.core.hints import Hint
from kvtier.index.policies.replayed import LRU

logger = logging.getLogger(__name__)

TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
MAX_NOTED = 4096
"""Most requests remembered: those reported lately, and those not reported yet."""


def policy_of(settings: StoreSettings, options: object, hooks: Hooks) -> str:
    """Return the eviction policy to use. It is LRU if SGLang does not report requests.

    Args:
        settings: the user's settings.
        options: SGLang's ``ServerArgs``, or None.
        hooks: the hooks that report requests; none if this SGLang does not support them.
    """
    if settings.eviction_policy == LRU:
        return LRU
    if getattr(options, "disaggregation_mode", None) == "decode":
        reason = "a server that only decodes looks nothing up"
    elif not hooks or missing(hooks):
        reason = "this SGLang does not tell of whole prompts"
    else:
        return settings.eviction_policy
    logger.info("kvtier: eviction policy lru: %s", reason)
    return LRU


def keys_up_to(tree: Any, node: Any, in_front: Sequence[str] | None = None) -> list[str]:
    """Return the keys of all hashed pages from the root of SGLang's tree to the end of a node.

    in_front: keys before the node (SGLang's prefix keys), if the caller knows them.
    """
    if in_front is None:
        in_front = tree.get_prefix_hash_values(node)
    return [*in_front, *tree.tree_core.get_hash_values(node)]


class PromptReporter:
    """Reports a linker's requests, on the scheduler's thread. Its methods never raise.

    A request that was not reported is served nevertheless.

    caches: those of the pools, that of the KV pool first. page_size: tokens per page.
    """

    def __init__(self, caches: Sequence[BlockCache], page_size: int) -> None:
        self._caches = caches
        self._cache = caches[0]
        self._page_size = page_size
        self._told: dict[int, weakref.ref[Any]] = {}  # reported requests, by their ``id``
        self._now: tuple[Any, int, Callable[[], Sequence[str]]] | None = None
        self._parent: Callable[[], str | None] | None = None

    @contextmanager
    def looking_up(
        self, req: Any, num_cached: int, before: Callable[[], Sequence[str]]
    ) -> Iterator[None]:
        """Mark SGLang's look-up of a request, perhaps a repeated one, by this context.

        Args:
            req: the request.
            num_cached: number of its first tokens that are on the device.
            before: return the keys of their pages.
        """
        is_new = self._cache.learns and not self._is_told(req)
        self._now = (req, num_cached, before) if is_new else None
        try:
            yield
        finally:
            self.look_up(())  # if the device has all whole pages, the linker is not called

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Report the current request. keys: its pages behind those on the device."""
        now, self._now = self._now, None
        if now is not None:
            with _quietly():
                self._tell(*now, keys)

    def _tell(
        self, req: Any, num_cached: int, before: Callable[[], Sequence[str]], keys: Sequence[bytes]
    ) -> None:
        first = before() if num_cached else ()
        if len(first) * self._page_size != num_cached:
            return  # some cached pages are not hashed yet
        at = id(req)
        self._told[at] = weakref.ref(req, lambda _: self._told.pop(at, None))
        prompt = [*page_keys(first), *keys]
        for cache in self._caches:
            cache.on_request(prompt)

    def _is_told(self, req: Any) -> bool:
        known = self._told.get(id(req))
        return known is not None and known() is req

    def note_node(self, parent: Callable[[], str | None]) -> None:
        """Note that the next store belongs to a node behind the page with the key ``parent``."""
        self._parent = parent

    def store(self, keys: Sequence[bytes], known: Container[bytes]) -> None:
        """Note that a node's pages are about to be stored.

        Pages that are not among ``known`` belong to an answer, and follow the page before them.
        """
        parent, self._parent = self._parent, None
        if not self._cache.learns:
            return
        first = next((at for at, key in enumerate(keys) if key not in known), len(keys))
        with _quietly():
            if first == len(keys):
                return
            if first:
                self._cache.continues(keys[first:], keys[first - 1])
            elif parent is not None and (key := parent()):
                self._cache.continues(keys, *page_keys([key]))


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("kvtier: a request was not reported to the eviction policy")


# -- the storage back end --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that joined the queue, or a hint that its client gave.

    Attributes:
        before: keys of the prompt's pages that SGLang has cached.
        rest: the prompt's tokens behind these, as SGLang's ``RadixKey``.
        last: key of the last cached page; None if there is none.
        hint: a hint to be applied to a prompt that was reported before.
    """

    before: Sequence[str]
    rest: Any
    last: str | None
    hint: Hint | None = None

    def keys(self, page_size: int) -> list[bytes]:
        """Return the keys of all whole pages of the prompt, from its beginning."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        rest = self.rest.page_aligned(page_size)
        behind = get_storage_hash_str(rest, self.last, page_size=page_size) if len(rest) else []
        return page_keys([*self.before, *behind])


class PrefetchWatch:
    """Reports requests that join the queue, on the scheduler's thread."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[QueuedRequest], object]] = []
        """Called once per request. They must neither raise nor wait."""
        self._known: OrderedDict[str, int] = OrderedDict()  # requests: tokens of each

    def hooks(self) -> Hooks:
        """Return the hooks around SGLang functions."""
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
        if self.listeners:
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
        for listener in self.listeners:
            listener(joined)


PREFETCHES = PrefetchWatch()
"""The instance of this process: a scheduler has one tree."""


def prefetch_hooks() -> Hooks:
    """Return the hooks that report requests to a storage back end; none for an unknown SGLang."""
    return {} if TELLING.differences() else PREFETCHES.hooks()
