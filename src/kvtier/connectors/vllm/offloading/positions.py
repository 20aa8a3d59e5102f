"""Positions of keys in their requests, for a vLLM that does not note them (before 0.31).

Importing this module makes vLLM's scheduler half note them where later versions do: when it makes
the keys of a request's blocks, and the key of a boundary that is no whole block. All other code of
kvtier may then rely on ``ReqContext._offload_key_positions``.
"""

from __future__ import annotations

from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

if TYPE_CHECKING:
    from vllm.v1.request import Request


def _no_positions(context: ReqContext) -> dict[OffloadKey, int]:
    """Return the positions of a request that has no keys yet."""
    return {}


def _position(context: ReqContext, key: OffloadKey) -> int | None:
    """Return the token at which a block ends; None for a key of another request."""
    found: int | None = context._offload_key_positions.get(key)
    return found


def _note_positions() -> None:
    """Give ``ReqContext`` the end token of each of its keys, as vLLM 0.31 does."""
    positions: Any = cached_property(_no_positions)
    positions.__set_name__(ReqContext, "_offload_key_positions")
    ReqContext._offload_key_positions = positions
    ReqContext.get_offload_key_position = _position
    update, make_boundary = (
        RequestOffloadState.update_offload_keys,
        OffloadingConnectorScheduler._make_boundary_key,
    )

    @wraps(update)
    def update_offload_keys(self: RequestOffloadState) -> None:
        """Make the keys of new blocks, and note the token at which each of them ends."""
        known = [len(group.offload_keys) for group in self.group_states]
        update(self)
        ends = self.req_context._offload_key_positions
        groups = zip(self.config.kv_group_configs, self.group_states, known, strict=True)
        for config, group, num_known in groups:
            for at, key in enumerate(group.offload_keys[num_known:], num_known + 1):
                ends[key] = at * config.tokens_per_chunk

    @wraps(make_boundary)
    def make_boundary_key(
        self: OffloadingConnectorScheduler, request: Request, group_idx: int, boundary: int
    ) -> OffloadKey:
        """Make the key of the block that ends at ``boundary``, a token, and note that."""
        key = make_boundary(self, request, group_idx, boundary)
        status = self._req_status[request.request_id]
        status.req_context._offload_key_positions[key] = boundary
        return key

    RequestOffloadState.update_offload_keys = update_offload_keys
    OffloadingConnectorScheduler._make_boundary_key = make_boundary_key


if not hasattr(ReqContext, "get_offload_key_position"):
    _note_positions()
