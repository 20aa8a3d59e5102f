"""Record the requests of SGLang. The first rank of each engine records."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvtier.connectors.common.recording import open_recorder, outcome, record_tokens
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.ranks import RankConfig, counter, is_first
from kvtier.observe.specs import SGLANG_RECORDED_REQUESTS

if TYPE_CHECKING:
    from kvtier.connectors.common.settings import ConnectorSettings
    from kvtier.observe.recording import Recorder

logger = logging.getLogger(__name__)

HEALTH_CHECK = "HEALTH_CHECK"
"""Prefix of the names of SGLang's own requests."""


class Recording:
    """Records finished requests, on the scheduler's thread, until it is closed.

    It records nothing unless the settings enable it, on other ranks than the first, or if the file
    can't be written.

    Args:
        settings: the connector's settings.
        config: this rank. With data-parallel attention, each ``dp_rank`` records its own requests.
        page_size: tokens per page.
        replica: number of the engine among independent replicas.
    """

    def __init__(
        self, settings: ConnectorSettings, config: RankConfig, page_size: int, replica: int
    ) -> None:
        self._recorder: Recorder | None = None
        if is_first(config):
            parts = (("replica", replica), ("dp", getattr(config, "dp_rank", 0)))
            which = "-".join(f"{name}{rank}" for name, rank in parts if rank)
            self._recorder = open_recorder(settings, record_tokens(page_size), _count, which)
        if self._recorder is not None:
            WATCH.end_listeners.append(self._ended)

    def _ended(self, req: Any) -> None:
        # The tokens of a request with embeddings are placeholders.
        if str(req.rid).startswith(HEALTH_CHECK) or req.input_embeds is not None:
            return
        assert self._recorder is not None
        try:
            self._recorder.offer(
                _arrival(req), req.origin_input_ids, len(req.output_ids), _tenant(req)
            )
        except Exception:
            logger.exception("kvtier: a request was not recorded")

    def close(self) -> None:
        """Write the requests recorded so far, and end. Safe to call twice."""
        if self._recorder is not None:
            WATCH.end_listeners.remove(self._ended)
            self._recorder.close()
            self._recorder = None


def _arrival(req: Any) -> float:
    """Return ``time.monotonic`` at a request's arrival.

    SGLang's own times are of ``perf_counter``, in the process that received the request first.
    """
    times = getattr(req, "time_stats", None)
    began = getattr(times, "created_time", 0.0) or getattr(times, "wait_queue_entry_time", 0.0)
    return time.monotonic() - (time.perf_counter() - began if began else 0.0)


def _tenant(req: Any) -> str:
    """Return what separates equal prompts in SGLang's own cache: salt and adapter name."""
    salt = getattr(req, "cache_salt", None) or ""  # before 0.5.23 it is in ``extra_key``
    return f"{salt}\0{req.extra_key}" if req.extra_key else salt


def _count(written: bool) -> None:
    counter(SGLANG_RECORDED_REQUESTS).labels(outcome(written)).inc()
