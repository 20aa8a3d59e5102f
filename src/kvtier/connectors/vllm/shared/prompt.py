"""Blocks of prompts and requests, whichever front cuts them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvtier.core.errors import printable
from kvtier.core.hints import Hint, KvHints, parse_hint, parse_kv_hints
from kvtier.core.types import DISK, HOST

if TYPE_CHECKING:
    from kvtier.connectors.vllm.shared.reach import Cuts

logger = logging.getLogger(__name__)

HINTS = "kvtier"
"""Field of a request's ``kv_transfer_params`` with hints on its conversation."""
GROUP_BYTES = 4
"""Bytes at the end of a key that name the block's KV group. Blocks of several groups that end at
the same token of a prompt have the same hash in front."""


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a block: vLLM's hash of the prompt up to its end, and its KV group."""
    return block_hash + group_bytes(group)


def group_bytes(group: int) -> bytes:
    """Return the end of the keys of a KV group."""
    return group.to_bytes(GROUP_BYTES, "big")


def group_of(key: bytes) -> int:
    """Return the KV group of a block."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


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
    def group_bytes(self) -> int:
        """Bytes at the end of a key that name its KV group; 0 for one group."""
        return 0 if self.has_one_group else GROUP_BYTES

    @property
    def has_unlike_blocks(self) -> bool:
        """Whether the blocks of some groups end at other tokens than those of others."""
        return len(set(self.block_sizes)) > 1


def depth(end: int, block_size: int) -> int:
    """Position in its prompt, in blocks, of the block that ends at a token; 0 for the first one."""
    return max(0, end // block_size - 1)


MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")
KINDS = {HOST: ("CPU", "LOCAL"), DISK: ("STORAGE", "LOCAL")}
UNLIMITED = 1 << 62

Matcher = tuple[str | None, str | None]
"""Medium and locality of tiers; None for any."""


def kind_of(tier: str) -> tuple[str, str]:
    """Return vLLM's names of a tier's medium and locality. A store is elsewhere."""
    return KINDS.get(tier, ("STORAGE", "REMOTE"))


TRANSFERS = ("do_remote_prefill", "remote_prefiller")
"""Parameters by which a client has another connector bring KV from a prefill server. NIXL's and its
like set theirs to false when the pages are there, so that a request that begins anew may load."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on what one request loads and stores, from its client's ``kv_transfer_params``.

    The parameters are those of vLLM's OffloadingConnector. Under it, vLLM applies
    ``max_load_tokens`` and ``max_offload_tokens``, and kvtier ``kv_load_tiers``.
    ``KvtierConnector`` applies all three.

    Attributes:
        max_load: Largest number of tokens to load behind the tokens that the device has.
        max_store: Number of leading tokens behind which nothing is stored.
        tiers: The request loads from tiers that match one of these; None for all tiers.
    """

    max_load: int = UNLIMITED
    max_store: int = UNLIMITED
    tiers: Sequence[Matcher] | None = None

    @classmethod
    def read(cls, params: Mapping[str, Any] | None) -> RequestLimits:
        """Read a request's parameters. As vLLM does, ignore what makes no sense, and log it."""
        if not params:
            return cls()
        return cls(
            _num_tokens(params, "max_load_tokens"),
            _num_tokens(params, "max_offload_tokens"),
            _tiers(params.get("kv_load_tiers")),
        )

    def allows(self, tier: str) -> bool:
        """Return whether the request may load from a tier."""
        if self.tiers is None:
            return True
        medium, locality = kind_of(tier)
        return any(one in (None, medium) and other in (None, locality) for one, other in self.tiers)


def _num_tokens(params: Mapping[str, Any], name: str) -> int:
    given = params.get(name)
    if type(given) is int and given >= 0:
        return given
    if given is not None:
        logger.warning("%s ignored: %s is no number of tokens", name, printable(str(given)))
    return UNLIMITED


def _tiers(given: object) -> list[Matcher] | None:
    """Read ``kv_load_tiers``: objects with "medium", "locality", or both. [] is no tier at all."""
    if given is None:
        return None
    found = [_matcher(each) for each in given] if isinstance(given, list) else [None]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        logger.warning("kv_load_tiers ignored, all or in part: %s", printable(str(given)))
    return known if known or not found else None


def _matcher(given: object) -> Matcher | None:
    """Return one entry of ``kv_load_tiers``; None for one that names nothing known."""
    if not isinstance(given, dict):
        return None
    medium, locality = given.get("medium"), given.get("locality")
    medium = medium.upper() if isinstance(medium, str) else medium
    locality = locality.upper() if isinstance(locality, str) else locality
    if medium not in (None, *MEDIA) or locality not in (None, *LOCALITIES):
        return None
    return medium, locality


@dataclass(eq=False)
class RequestBlocks:
    """Blocks of one request, and the parameters that its client sent.

    Args:
        request_id: the engine's.
        ends: the token at which each block ends, by its key: group by group, in prompt order. The
            front adds to it as the request gets longer.
        params: the client's ``kv_transfer_params``.
        envelope: an orchestrator's ``kv_hints``, from vLLM 0.32.
        last_key: the last block that the eviction policy knows of; None before it knows of any.
        source: vLLM's request, or a wrapper that replaces its block hashes.
    """

    request_id: str
    ends: dict[bytes, int] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    envelope: object = None
    last_key: bytes | None = None
    source: Any = None

    def in_order(self) -> list[bytes]:
        """Return all blocks, the prompt's start first; those as well that vLLM's pool had."""
        return sorted(self.ends, key=self.ends.__getitem__)

    def path(self, block_size: int, cuts: Cuts) -> list[bytes]:
        """Return those of ``in_order`` that a cut needs, without the ends of prompts.

        The ends are no whole blocks: vLLM tries many of them where it looks for the state of
        recurrent layers. block_size: greatest common divisor of the groups' blocks.
        """
        ends = self.ends
        return [
            key
            for key in self.in_order()
            if (end := ends[key]) % block_size == 0 and cuts.need(key, end)
        ]

    def after(self, num_tokens: int) -> list[bytes]:
        """Return the blocks that end behind the first tokens: group by group, in prompt order."""
        return [key for key, end in self.ends.items() if end > num_tokens]

    @property
    def is_transferred(self) -> bool:
        """Whether another connector is to bring the KV of this request now."""
        return self.params is not None and any(self.params.get(name) for name in TRANSFERS)

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
