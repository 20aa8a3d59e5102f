"""Storage tier in a node: blocks go between this process's memory and the node's, by one copy.

For engines whose cache stores blocks in storage tiers. ``node="/run/kvtier/node.sock"``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from kvtier.cache.guard import PartitionFacts
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.hot import copy_batch
from kvtier.core.system.user_paths import user_path
from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.index.selection import Int64s
from kvtier.node.client.channel import Answer, Channel, NodeClient, NodeError, OpenedPartition
from kvtier.node.wire import protocol
from kvtier.tiers import Outcome, Pieces, StorageFacts, StorageSite, StorageTier
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.pieces import HOST_KINDS

SCOPE = b"kvtier storage tier".ljust(32, b"\0")
"""Scope of all blocks of such tiers, since their keys contain the namespace."""
KEY_BYTES = 32
ANSWER_S = 0.25
"""Longest wait for an answer that needs no storage."""
OPEN_S = 5.0
"""Longest wait for a partition, for which the node may have to open a slab."""
GRACE_S = 0.5
"""A request is given up so much later than the node was asked to answer by."""
DROP_S = 10.0

THERE, ABSENT, DAMAGED, FAILED = Outcome


def make_node(site: StorageSite) -> NodeTier:
    """Make the tier of ``node="/path/of/the/socket"``."""
    path = user_path(site.location)
    if not path.is_absolute():
        raise ConfigError(
            "node: the socket has no absolute path; write it as in /run/kvtier/node.sock"
        )
    return NodeTier(site, NodeClient(path, site.tenant, title=site.title))


class NodeTier(StorageTier):
    """Blocks of this process in a node.

    Calls to a node that is unreachable or late have failed. ``client`` is the tier's own.
    """

    facts = StorageFacts(
        reaches=HOST_KINDS, evicts=True, is_shared=True, num_readers=2, num_writers=2
    )

    def __init__(self, site: StorageSite, client: NodeClient) -> None:
        self.name = site.name
        self.bytes_per_block = site.group.bytes_per_block
        self._capacity_bytes = site.capacity_bytes
        self._num_blocks = site.capacity_bytes // self.bytes_per_block
        self._client = client
        self._facts = PartitionFacts(SCOPE, self.bytes_per_block, KEY_BYTES)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that this process knows of at most: never more than the node has."""
        return self._num_blocks

    @property
    def breaker(self) -> BreakerState:
        return self._client.breaker.state

    @property
    def last_error(self) -> str:
        return self._client.last_error

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        told = {protocol.MISSING: ABSENT, protocol.THERE: THERE}

        def ask(node: _Opened) -> list[Outcome]:
            request = protocol.FindRequest(0, 0, b"".join(keys), timeout_s)
            answer = node.ask(request, protocol.OutcomesAnswer)
            return [told.get(outcome, FAILED) for outcome in answer.outcomes]

        return self._call(ask, timeout_s, len(keys))

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self._call(partial(self._get, keys, blocks, timeout_s), timeout_s, len(keys))

    def _get(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float, node: _Opened
    ) -> list[Outcome]:
        request = protocol.LookupRequest(0, 0, b"".join(keys), counts=False)
        found = node.ask(request, protocol.LookupAnswer, ANSWER_S)
        places = np.frombuffer(found.places, np.uint8)
        outcomes = [ABSENT] * len(keys)
        here = np.flatnonzero(places == protocol.MEMORY)
        self._load(node, (found.slots, found.generations), here, blocks, outcomes)
        elsewhere = np.flatnonzero((places != protocol.MEMORY) & (places != protocol.ABSENT))
        if not len(elsewhere):
            return outcomes
        wanted = b"".join(keys[at] for at in elsewhere.tolist())
        fetched = node.ask(protocol.FetchRequest(0, 0, wanted, timeout_s), protocol.FetchAnswer)
        slots, generations = map(protocol.unpack, (fetched.slots, fetched.generations))
        for at in elsewhere[np.frombuffer(fetched.failed, bool)].tolist():
            outcomes[at] = FAILED
        there = slots >= 0
        leased = protocol.pack(slots[there]), protocol.pack(generations[there])
        self._load(node, leased, elsewhere[there], blocks, outcomes)
        return outcomes

    def _load(
        self,
        node: _Opened,
        leased: tuple[bytes, bytes],
        at: Int64s,
        blocks: Pieces,
        outcomes: list[Outcome],
    ) -> None:
        """Copy leased slots to the blocks at positions ``at``, and release them.

        A slot that was given to another block meanwhile has the wrong bytes.
        """
        slots, generations = map(protocol.unpack, leased)
        if not len(slots):
            return
        try:
            _copy(blocks.pick(at), self._pieces(node, slots, blocks))
            is_right = node.partition.generations[slots] == generations
        finally:
            node.notify(protocol.ReleaseNotice(0, leased[0]))
        for number, is_there in zip(at.tolist(), is_right.tolist(), strict=True):
            outcomes[number] = THERE if is_there else DAMAGED

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self._call(partial(self._put, names, blocks), timeout_s, len(names))

    def _put(self, names: Sequence[BlockName], blocks: Pieces, node: _Opened) -> list[Outcome]:
        request = protocol.ReserveRequest(0, 0, b"".join(name.key for name in names))
        reserved = node.ask(request, protocol.ReserveAnswer, ANSWER_S)
        new = np.flatnonzero(np.frombuffer(reserved.new, bool))
        slots = protocol.unpack(reserved.slots)
        if len(slots):
            try:
                _copy(self._pieces(node, slots, blocks), blocks.pick(new))
            except BaseException:
                node.notify(protocol.AbortNotice(0, reserved.slots))
                raise
            depths = protocol.pack([names[at].depth for at in new.tolist()])
            node.notify(protocol.CommitNotice(0, reserved.slots, depths))
        known = np.frombuffer(reserved.known, bool).copy()
        known[new] = True
        return [THERE if each else FAILED for each in known.tolist()]

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        if not keys or not for_good:
            return  # other engines may still use it, and the node evicts by itself

        def ask(node: _Opened) -> list[Outcome]:
            request = protocol.DeleteRequest(0, 0, b"".join(keys))
            answer = node.ask(request, protocol.OutcomesAnswer)
            return [FAILED if protocol.FAILED in answer.outcomes else THERE]

        if self._call(ask, DROP_S, 1) != [THERE]:
            raise TierError(self.name, "drop", self.last_error or "no answer")

    def _pieces(self, node: _Opened, slots: Int64s, blocks: Pieces) -> Pieces:
        """Return the places of blocks in the node's memory, cut like ``blocks``."""
        address = np.uint64(node.partition.mapped.memory.address)
        begins = address + slots.astype(np.uint64) * np.uint64(self.bytes_per_block)
        return Pieces.whole(begins, self.bytes_per_block).cut(blocks.sizes)

    def _call(
        self, ask: Callable[[_Opened], list[Outcome]], timeout_s: float, num_keys: int
    ) -> list[Outcome]:
        """Return the outcomes of requests; all have failed if the node is not there, or late."""
        now_s = time.monotonic()
        until_s = now_s + max(timeout_s, 0.0) + GRACE_S
        try:
            taken = self._client.take(min(until_s, now_s + ANSWER_S))
            with self._client.using(taken) as channel:
                opened = channel.partition(self._facts, min(until_s, time.monotonic() + OPEN_S))
                if opened.capacity_bytes:
                    capacity_bytes = min(self._capacity_bytes, opened.capacity_bytes)
                    self._num_blocks = capacity_bytes // self.bytes_per_block
                return ask(_Opened(channel, opened, until_s))
        except NodeError:
            return [FAILED] * num_keys

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", str(self._client.path), self.last_error)]

    def close(self) -> None:
        self._client.close()


class _Opened(NamedTuple):
    """The node's partition during one call. until_s: its deadline, by ``time.monotonic``."""

    channel: Channel
    partition: OpenedPartition
    until_s: float

    def ask(
        self, request: protocol.PartitionRequest, kind: type[Answer], most_s: float = inf
    ) -> Answer:
        """Return the answer to a request on the partition, within ``most_s``."""
        request.partition = self.partition.number
        return self.channel.request(request, kind, min(self.until_s, time.monotonic() + most_s))

    def notify(self, notice: protocol.PartitionNotice) -> None:
        """Send a notice on the partition."""
        notice.partition = self.partition.number
        self.channel.notify(notice)


def _copy(to: Pieces, at: Pieces) -> None:
    """Copy blocks; both have pieces of the same sizes."""
    sizes = np.tile(to.sizes.astype(np.uint64), len(to))
    copy_batch(to.addresses.ravel(), at.addresses.ravel(), sizes)
