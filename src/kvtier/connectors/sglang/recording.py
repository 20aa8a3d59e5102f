"""Record the requests of SGLang. The first rank of each engine records."""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from kvtier.connectors.common.recording import MEANING, open_recorder, outcome, record_tokens
from kvtier.connectors.sglang.prefill import WATCH

if TYPE_CHECKING:
    from prometheus_client import Counter

    from kvtier.connectors.common.settings import ConnectorSettings
    from kvtier.connectors.sglang.identity import StorageConfig
    from kvtier.recording import Recorder

logger = logging.getLogger(__name__)

METRIC = "sglang:kvtier_recorded_requests"
"""Name in Prometheus, without ``_total``."""
HEALTH_CHECK = "HEALTH_CHECK"
"""So begin the names of requests of SGLang's own."""


class Recording:
    """Listens to which requests end, on the scheduler's thread, until it is closed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        WATCH.listen_to_ends(self._ended)

    def _ended(self, req: Any) -> None:
        # Where a request brings embeddings, its tokens say nothing.
        if str(req.rid).startswith(HEALTH_CHECK) or req.input_embeds is not None:
            return
        try:
            self._recorder.offer(
                _arrival(req), req.origin_input_ids, len(req.output_ids), _tenant(req)
            )
        except Exception:
            logger.exception("kvtier: a request was not recorded")

    def close(self) -> None:
        """Write what was reported, and end."""
        WATCH.leave_ends(self._ended)
        self._recorder.close()


def open_recording(
    settings: ConnectorSettings, config: StorageConfig, page_size: int, replica: int
) -> Recording | None:
    """Open a recording on the rank that records, if the settings ask for one.

    None if the file can't be written. replica: of engines that share nothing; beside it, attention
    may be data parallel (``dp_rank``): each has requests of its own.
    """
    if not settings.record or config.tp_rank or config.pp_rank or config.attn_cp_rank:
        return None
    parts = (("replica", replica), ("dp", getattr(config, "dp_rank", 0)))
    which = "-".join(f"{name}{rank}" for name, rank in parts if rank)
    recorder = open_recorder(settings, record_tokens(page_size), _count, which)
    return None if recorder is None else Recording(recorder)


def _arrival(req: Any) -> float:
    """Return ``time.monotonic`` at a request's arrival.

    SGLang's own times are those of ``perf_counter``, from whichever of its processes saw the
    request first.
    """
    times = getattr(req, "time_stats", None)
    began = getattr(times, "created_time", 0.0) or getattr(times, "wait_queue_entry_time", 0.0)
    return time.monotonic() - (time.perf_counter() - began if began else 0.0)


def _tenant(req: Any) -> str:
    """Return what separates equal prompts in SGLang's own cache.

    The salt, and the adapter's name.
    """
    salt = getattr(req, "cache_salt", None) or ""  # before 0.5.23 it is in the other one
    return f"{salt}\0{req.extra_key}" if req.extra_key else salt


def _count(written: bool) -> None:
    _counter().labels(outcome(written)).inc()


@cache
def _counter() -> Counter:
    # Imported as late as SGLang does: the environment says then where its processes count together.
    from prometheus_client import Counter

    return Counter(METRIC, MEANING, ["outcome"])
