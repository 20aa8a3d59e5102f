"""Hints in requests (``kv_hints``, which SGLang 0.5.23 carries and does not read)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.prompt_reporting import MAX_NOTED, QueuedRequest
from kvtier.connectors.sglang.shared.ranks import RankConfig, counter, is_first
from kvtier.core.hints import Hint, parse_kv_hints
from kvtier.core.types import ClientHints
from kvtier.observe.specs import SGLANG_HINT_ACTIONS

if TYPE_CHECKING:
    from kvtier.connectors.common.settings import StoreSettings

logger = logging.getLogger(__name__)


class HintReader:
    """Reads the hints of requests that begin or end, on the scheduler's thread, until it is closed.

    Args:
        settings: the connector's settings.
        config: this rank. The first one counts the actions.
        listener: called with a prompt and a hint, to be applied now. At the end of a request the
            prompt includes the answer.
    """

    def __init__(
        self,
        settings: StoreSettings,
        config: RankConfig,
        listener: Callable[[QueuedRequest], object],
    ) -> None:
        self._listener = listener
        self._counts = is_first(config)
        self._is_eagle = False
        self._hints: dict[str, Hint | None] = {}  # of requests that were begun
        if settings.client_hints is not ClientHints.OFF:
            WATCH.begin_listeners.append(self._begin)
            WATCH.end_listeners.append(self._end)

    def close(self) -> None:
        """Read no more hints. Safe to call twice."""
        if self._begin in WATCH.begin_listeners:
            WATCH.begin_listeners.remove(self._begin)
            WATCH.end_listeners.remove(self._end)

    def _begin(self, req: Any, tree: Any) -> None:
        envelope = getattr(req, "kv_hints", None)
        if envelope is None or req.rid in self._hints:
            return
        found = parse_kv_hints(envelope)
        for action in found.actions if self._counts else ():
            counter(SGLANG_HINT_ACTIONS).labels(action.value).inc()
        self._is_eagle = tree.tree_core.is_eagle
        self._hints[req.rid] = found.hint
        if len(self._hints) > MAX_NOTED:  # some requests ended without an answer
            del self._hints[next(iter(self._hints))]
        if found.hint is not None:
            self._tell(req, found.hint.at_begin)

    def _end(self, req: Any) -> None:
        hint = self._hints.pop(req.rid, None)
        if hint is not None:
            self._tell(req, hint.at_end, req.output_ids)
            self._tell(req, hint.after_end, req.output_ids)

    def _tell(self, req: Any, hint: Hint, answer: Any = ()) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if hint == Hint():
            return
        tokens = array("q", [*req.origin_input_ids, *answer])
        salt = req.cache_salt
        key = RadixKey(tokens, req.extra_key, is_bigram=self._is_eagle, cache_salt=salt)
        try:
            self._listener(QueuedRequest((), key, None, hint))
        except Exception:
            logger.exception("kvtier: a hint was not applied")
