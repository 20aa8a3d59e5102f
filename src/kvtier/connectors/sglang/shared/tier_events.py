"""KV events of kvtier's tiers, in SGLang's own stream (``--kv-events-config``).

kvtier knows its pages by SGLang's page hashes only. The events of SGLang's tree, which pass here
before they are published, have the rest: tokens, parent, salt, and the hash that is published. A
page that is in a tier already, left by an earlier process, is published once the tree has it.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvtier.cache.block_cache import Change
from kvtier.connectors.sglang.shared.contract import EVENTS
from kvtier.connectors.sglang.shared.hooks import Hooks, missing
from kvtier.connectors.sglang.shared.prompt_reporting import TREE
from kvtier.core.types import DISK, HOST

logger = logging.getLogger(__name__)

MAX_KNOWN = 1 << 16
"""Pages whose descriptions are remembered: 55 MB at 64 tokens per page."""
HASH_BYTES = 8
"""Bytes of a page's key that SGLang publishes as its hash, if the page has no salt."""
MEDIA = {HOST: "CPU_PINNED", DISK: "DISK"}
"""SGLang's names of media. Stores, and a node, are ``EXTERNAL``."""
EXTERNAL = "EXTERNAL"


@dataclass(slots=True)
class Page:
    """A page as SGLang's tree has published it.

    Attributes:
        hash: its published hash. parent: that of the page before; None at a prompt's beginning.
        tokens: its token ids; pairs of them for EAGLE.
        salt: the tenant's ``cache_salt``.
        start: beginning of its key. key: its key, if it has a salt.
        media: media in which kvtier has it.
    """

    hash: int
    parent: int | None
    tokens: Sequence[Any]
    salt: str | None
    start: int
    key: str
    media: set[str]


class PublishedPages:
    """Pages as SGLang publishes them, and the events of pages in kvtier's tiers.

    Used on the scheduler's thread.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Change]]] = []
        """Each returns the changes of a cache since its last call, and must not wait."""
        self._kinds: Any = None  # SGLang's module of events
        self._pages: OrderedDict[int, Page] = OrderedDict()  # by published hash
        self._salted: dict[int, int] = {}  # published hashes, by the beginning of the key
        self._waiting: OrderedDict[int, set[str]] = OrderedDict()  # media of pages not described

    def hooks(self) -> Hooks:
        """Return the hooks around SGLang functions."""
        return {f"{TREE}.take_events": self._take}

    def add(self, options: object, changes: Callable[[], Iterable[Change]]) -> bool:
        """Publish the changes of a cache. Return False if SGLang publishes no events here.

        options: SGLang's ``ServerArgs``, or None.
        """
        config = getattr(options, "kv_events_config", None)
        if not config:
            return False
        if found := EVENTS.differences() or missing(self.hooks()):
            logger.warning("kvtier publishes no events of its tiers: %s", found[0])
            return False
        self._kinds = import_module("sglang.srt.disaggregation.kv_events")
        if publishes := self._kinds.is_kv_publisher_rank(config):
            self.sources.append(changes)
        return bool(publishes)

    def remove(self, changes: Callable[[], Iterable[Change]]) -> None:
        """Publish the changes of a cache no more."""
        if changes in self.sources:
            self.sources.remove(changes)
            self.forget()

    def forget(self) -> None:
        """Forget all pages."""
        for table in (self._pages, self._salted, self._waiting):
            table.clear()

    def _take(self, take: Callable[..., list[Any]], tree: Any) -> list[Any]:
        events = take(tree)
        try:
            changes = [change for source in self.sources for change in source()]
            if self.sources and (events or changes):
                return [*events, *self._of(events, changes)]
        except Exception:
            logger.exception("kvtier: events of its tiers are not published")
        return events

    def _of(self, events: Iterable[Any], changes: Iterable[Change]) -> Iterator[Any]:
        """Yield the events of kvtier's tiers that follow those of the tree."""
        described: list[Page] = []
        is_cleared = False
        for event in events:
            if isinstance(event, self._kinds.BlockStored):
                described += self._describe(event)
            is_cleared |= isinstance(event, self._kinds.AllBlocksCleared)
        found = [event for change in changes for event in self._moved(change)]
        if is_cleared:
            yield from self._begin_anew()
            return
        yield from self._stored(described)
        yield from found
        yield from self._shrink()

    def _describe(self, event: Any) -> list[Page]:
        """Remember the pages of an event of the tree. Return the ones that a tier has already."""
        size, salt, parent = event.block_size, event.cache_salt, event.parent_block_hash
        hashes, tokens = event.block_hashes, event.token_ids
        if event.lora_name or not size or len(tokens) != len(hashes) * size:
            return []  # the keys of an adapter's pages do not follow from its events
        keys = self._keys(tokens, parent, salt, size) if salt else [""] * len(hashes)
        found = []
        for at, (published, key) in enumerate(zip(hashes, keys, strict=False)):
            start = _start(bytes.fromhex(key)) if salt else published
            if published not in self._pages and self._salted.get(start, published) == published:
                some = tokens[at * size : (at + 1) * size]
                packed = some if isinstance(some[0], tuple) else array("q", some)
                media = self._waiting.pop(start, set())
                page = Page(published, parent, packed, salt, start, key, media)
                self._add(page)
                if media:
                    found.append(page)
            parent = published
        return found

    def _keys(
        self, tokens: Sequence[Any], parent: int | None, salt: str, page_size: int
    ) -> Sequence[str]:
        """Return the keys of salted pages. None are known behind an unknown page."""
        from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

        before = None if parent is None else self._pages.get(parent)
        if isinstance(tokens[0], tuple) or (parent is not None and before is None):
            return []
        last = before.key if before else storage_namespace_seed(None, salt)
        keys: Sequence[str] = get_hash_str(array("q", tokens), last, page_size=page_size)
        return keys

    def _add(self, page: Page) -> None:
        self._pages[page.hash] = page
        if page.salt:
            self._salted[page.start] = page.hash

    def _begin_anew(self) -> Iterator[Any]:
        """Yield the present state, for readers that an event has made forget all.

        Readers can't place a page behind one that is nowhere: it waits until the tree has both.
        """
        pages, self._pages = self._pages, OrderedDict()
        self._salted.clear()
        for page in pages.values():
            if page.media and (page.parent is None or page.parent in self._pages):
                self._add(page)
            elif page.media:
                self._waiting[page.start] = page.media
        yield from self._stored(self._pages.values())

    def _moved(self, change: Change) -> Iterator[Any]:
        """Yield the events of pages that entered a tier, or left it."""
        medium = MEDIA.get(change.tier, EXTERNAL)
        stored, removed = [], []
        for start in map(_start, change.keys):
            published = self._salted.get(start, start)
            page = self._pages.get(published)
            media = page.media if page else self._waiting.get(start)
            if change.is_removed:
                if media is not None:
                    media.discard(medium)
                if page or media is None:  # else it was not published
                    removed.append(published)
            elif page:
                page.media.add(medium)
                stored.append(page)
            else:
                self._waiting.setdefault(start, set()).add(medium)
        if removed:
            yield self._kinds.BlockRemoved(removed, medium)
        yield from self._stored(stored, medium)

    def _shrink(self) -> Iterator[Any]:
        """Forget the oldest pages beyond ``MAX_KNOWN``.

        A salted page that kvtier has is published as removed, since its hash is forgotten with it.
        """
        while len(self._waiting) > MAX_KNOWN:
            self._waiting.popitem(last=False)
        while len(self._pages) > MAX_KNOWN:
            published, page = self._pages.popitem(last=False)
            if page.salt:
                self._salted.pop(page.start)
                yield from (self._kinds.BlockRemoved([published], it) for it in page.media)

    def _stored(self, pages: Iterable[Page], medium: str = "") -> Iterator[Any]:
        """Yield the events of pages in a medium, or in all of theirs: one for each run of pages."""
        runs: dict[str, Any] = {}
        for page in pages:
            for where in (medium,) if medium else page.media:
                run = runs.get(where)
                if run is not None and run.block_hashes[-1] == page.parent:
                    run.block_hashes.append(page.hash)
                    run.token_ids.extend(page.tokens)
                    continue
                if run is not None:
                    yield run
                tokens, size = list(page.tokens), len(page.tokens)
                stored = self._kinds.BlockStored
                runs[where] = stored([page.hash], page.parent, tokens, size, None, where, page.salt)
        yield from runs.values()


def _start(key: bytes) -> int:
    return int.from_bytes(key[:HASH_BYTES], "big", signed=True)


TIER_EVENTS = PublishedPages()
"""The instance of this process: a scheduler has one tree."""
