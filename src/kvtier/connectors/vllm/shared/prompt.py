"""Blocks of prompts and requests, whichever front cuts them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvtier.connectors.vllm.shared.limits import RequestLimits
from kvtier.core.errors import printable
from kvtier.core.hints import Hint, KvHints, parse_hint, parse_kv_hints

logger = logging.getLogger(__name__)

HINTS = "kvtier"
"""Field of a request's ``kv_transfer_params`` with hints on its conversation."""
GROUP_BYTES = 4
"""Bytes at the end of a key that name the block's KV group. Blocks of several groups that end at
the same token of a prompt have the same hash in front."""


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a block: vLLM's hash of the prompt up to its end, and its KV group."""
    return block_hash + group.to_bytes(GROUP_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Shape:
    """Block sizes of an engine.

    block_sizes: tokens in a block, of each KV group. bytes_per_block: of the largest one, on one
    rank. num_shards: ranks that each keep a part of every block.
    """

    block_sizes: tuple[int, ...]
    bytes_per_block: int
    num_shards: int = 1

    @property
    def has_one_group(self) -> bool:
        return len(self.block_sizes) == 1

    @property
    def is_cut_alike(self) -> bool:
        """Whether the blocks of all groups end at the same tokens.

        Then they stand and fall together. Otherwise a group may keep a block here and there, and
        its prompts have gaps that no policy knows of.
        """
        return len(set(self.block_sizes)) == 1


def depth(end: int, block_size: int) -> int:
    """Position in its prompt, in blocks, of the block that ends at a token; 0 for the first one."""
    return max(0, end // block_size - 1)


@dataclass(eq=False)
class RequestBlocks:
    """Blocks of one request, and the parameters that its client sent.

    Args:
        request_id: the engine's.
        ends: the token at which each block ends, by its key: group by group, in prompt order. The
            front adds to it as the request gets longer.
        params: the client's ``kv_transfer_params``.
        envelope: an orchestrator's ``kv_hints``, from vLLM 0.32.
    """

    request_id: str
    ends: dict[bytes, int] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    envelope: object = None

    def in_order(self) -> list[bytes]:
        """Return all blocks, the prompt's start first; those as well that vLLM's pool had."""
        return sorted(self.ends, key=self.ends.__getitem__)

    def path(self, block_size: int) -> list[bytes]:
        """Return ``in_order``, without the ends of prompts that are no whole blocks.

        vLLM tries many of these where it looks for the state of recurrent layers.
        """
        return [key for key in self.in_order() if self.ends[key] % block_size == 0]

    def after(self, num_tokens: int) -> list[bytes]:
        """Return the blocks that end behind the first tokens: group by group, in prompt order."""
        return [key for key, end in self.ends.items() if end > num_tokens]

    @cached_property
    def limits(self) -> RequestLimits:
        """The client's limits on what is loaded and stored. They are read once."""
        return RequestLimits.read(self.params)

    @cached_property
    def kv_hints(self) -> KvHints:
        """The orchestrator's hints. They are read once."""
        return parse_kv_hints(self.envelope)

    @cached_property
    def hint(self) -> Hint | None:
        """The client's hint, else the orchestrator's. It is read once.

        An invalid hint is logged and ignored, since vLLM has accepted the request before a
        connector sees it.
        """
        given = (self.params or {}).get(HINTS)
        if given is None:
            return self.kv_hints.hint
        try:
            return parse_hint(given)
        except ValueError as error:
            logger.warning("hint ignored request=%s error=%s", printable(self.request_id), error)
            return None
