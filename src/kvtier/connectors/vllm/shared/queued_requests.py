"""Requests in vLLM's queue, whose blocks are about to be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier.connectors.vllm.shared.prompt import group_key

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_BLOCKS = 2048
"""Most blocks reported per prompt, and per step. Each costs a third of a microsecond on the
scheduler's thread. A burst of requests is reported over the following steps in order of arrival;
of a longer prompt only its beginning is reported."""

Tell = Callable[[Sequence[bytes], bool], None]
"""Called with a prompt's blocks, and whether its request begins to wait or waits no more."""


class QueuedRequests:
    """Reports each request once when it begins to wait, and once when it waits no more.

    A request that is scheduled in the first step after it came is not reported.

    hashes_per_block: number of vLLM's hashes per block. group: the KV group whose keys stand for
    those of all groups.
    """

    def __init__(self, hashes_per_block: int, group: int, tell: Tell) -> None:
        self._hashes_per_block = hashes_per_block
        self._group = group
        self._tell = tell
        self._new: dict[str, Request] = {}
        self._told: dict[str, list[bytes]] = {}

    def on_queued(self, request: Request) -> None:
        """Note that a request joins the queue."""
        self._new[request.request_id] = request

    def on_dequeued(self, request_id: str) -> None:
        """Note that a request was scheduled, or has ended."""
        self._new.pop(request_id, None)
        keys = self._told.pop(request_id, None)
        if keys is not None:
            self._tell(keys, False)

    def end_step(self) -> None:
        """Report requests that came before this step and were not scheduled in it."""
        num_left = MAX_BLOCKS
        while self._new and num_left > 0:
            request_id = next(iter(self._new))
            keys = self._keys(self._new.pop(request_id))
            num_left -= max(1, len(keys))
            if keys:
                self._told[request_id] = keys
                self._tell(keys, True)

    def _keys(self, request: Request) -> list[bytes]:
        every = self._hashes_per_block
        block_hashes = request.block_hashes[every - 1 : every * MAX_BLOCKS : every]
        return [group_key(block_hash, self._group) for block_hash in block_hashes]
