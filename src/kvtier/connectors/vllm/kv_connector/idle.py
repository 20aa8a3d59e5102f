"""Steps of an engine that has no request left, while its connector has work."""

from __future__ import annotations

import functools
from typing import Any


def take_steps_while_busy() -> None:
    """Make vLLM's scheduler take steps while its connector has pending work.

    vLLM does so itself from 0.25 on. Older versions take no steps without requests, so blocks
    stored by the last request would reach the disk only with the next request, or never.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = Scheduler.has_finished_requests
    if hasattr(KVConnectorBase_V1, "has_pending_push_work") or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def has_finished_requests(self: Any) -> bool:
        return theirs(self) or _has_work(self.connector)

    Scheduler.has_finished_requests = has_finished_requests


def _has_work(connector: Any) -> bool:
    """Return whether a connector, or one inside it (MultiConnector), has work."""
    asks = getattr(connector, "has_pending_push_work", None)
    inside = getattr(connector, "_connectors", ())
    return bool(asks and asks()) or any(map(_has_work, inside))
