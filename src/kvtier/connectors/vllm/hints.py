"""Hints on a conversation in a request's ``kv_transfer_params``: ``{"kvtier": {...}}``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import printable
from kvtier.hints import Hint, parse_hint

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

logger = logging.getLogger(__name__)

FIELD = "kvtier"


@dataclass(frozen=True, slots=True)
class _Read:
    hint: Hint | None


def hint_of(context: ReqContext) -> Hint | None:
    """Read once.

    vLLM has taken the request when a connector sees it: a hint that can't be understood is none,
    and the log says why.
    """
    read: _Read | None = context.get_state(_Read)
    if read is None:
        read = _Read(_parse(context))
        context.set_state(read)
    return read.hint


def _parse(context: ReqContext) -> Hint | None:
    given = (context.kv_transfer_params or {}).get(FIELD)
    if given is None:
        return None
    try:
        return parse_hint(given)
    except ValueError as error:
        logger.warning("hint ignored request=%s error=%s", printable(context.req_id), error)
        return None
