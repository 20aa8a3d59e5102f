"""Prefix cache for models with recurrent layers: a prefix can be reused where it has a snapshot.

The state of recurrent layers is large and has no token axis, so it is stored at few points of a
prompt. A snapshot is a branch of the prompt's path, of blocks like all others: it begins below the
last block of its prefix. So tiers, policies and storage know one kind of block, and weigh snapshots
against KV by the room that they take:

    kv 0 -- kv 1 -- kv 2 -- kv 3 -- kv 4 ...
                      \
                       state 0 -- state 1 -- state 2       (reusable: 3 blocks)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvtier.cache.deletion import Deletion
from kvtier.cache.lease import Lease
from kvtier.cache.states.lease import Snapshot, SnapshotLease, SnapshotMatch
from kvtier.cache.states.stateful import StatefulCache
from kvtier.cache.token_lookup import begin_lookup
from kvtier.cache.transfer import LayerGate
from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, Label, Match
from kvtier.devices import Device
from kvtier.observe.block_events import BlockLog
from kvtier.plan import Plan
from kvtier.tiers import ArenaOptions, DeviceTier, StorageTier

SNAPSHOT_TOKENS = 4096
"""Tokens between two snapshots of a long prompt. Qwen3-Next's KV of so many tokens is as large as
one and a third of its states."""

MAX_COMPARED = 4
"""Snapshots of a prompt that the planner compares."""


class SnapshotCache(StatefulCache):
    """A prefix cache over the engine's device pool, for a model with recurrent layers.

    A request writes snapshots to the lease's ``snapshot_slots``: after its last whole chunk, at the
    end of the cached part of its prompt, and about every ``SNAPSHOT_TOKENS``.

    Args:
        config, device, pool, clock, storage, arena, events, names_codec: as in ``Cache``.
        blocks_per_snapshot: blocks that the state takes.
        grain_blocks: blocks of a chunk; snapshots follow whole chunks.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: Device,
        pool: DeviceTier,
        clock: Callable[[], float] = time.monotonic,
        storage: Sequence[StorageTier] = (),
        arena: ArenaOptions | None = None,
        events: BlockLog | None = None,
        names_codec: bool = False,
        *,
        blocks_per_snapshot: int,
        grain_blocks: int = 1,
    ) -> None:
        super().__init__(config, device, pool, clock, storage, arena, events, names_codec)
        self._size = self.state_blocks = blocks_per_snapshot
        self._grain = grain_blocks
        self._labels = [_state_label(at) for at in range(blocks_per_snapshot)]
        grain_tokens = grain_blocks * self.group.block_size
        self._every = max(1, SNAPSHOT_TOKENS // grain_tokens) * grain_blocks
        self._deletion.branch, self._deletion.grain = self._labels, grain_blocks

    # -- what is there ----------------------------------------------------------------------------

    def _snapshots(
        self, namespace: bytes, labels: Sequence[Label], known: Match
    ) -> Sequence[Snapshot]:
        return list(islice(self._find_snapshots(namespace, labels, known), MAX_COMPARED))

    def _find_snapshots(
        self, namespace: bytes, labels: Sequence[Label], known: Match
    ) -> Iterator[Snapshot]:
        last = known.num_blocks // self._grain * self._grain
        for at in range(last, 0, -self._grain):
            above = known.blocks[at - 1]
            if not self._index.states(namespace, self._labels[:1], DEVICE, above):
                continue
            found = self._snapshot(namespace, labels, at)
            if found is not None:
                yield found

    def _snapshot(self, namespace: bytes, labels: Sequence[Label], at: int) -> Snapshot | None:
        found = self._match_path(namespace, self._path(labels, at))
        if found.num_blocks < at + self._size:
            return None
        return Snapshot(
            at, Match(found.blocks[at:], found.tiers[at:], found.in_flight[at:], self._size)
        )

    def _state_at(self, lease: Lease, num_blocks: int) -> Snapshot | None:
        return self._snapshot(lease.namespace, lease.labels, num_blocks)

    def _path(self, labels: Sequence[Label], num_blocks: int) -> list[Label]:
        """Return the labels of a snapshot's path."""
        return [*labels[:num_blocks], *self._labels]

    def lookup(self, namespace: bytes, labels: Sequence[Label]) -> bool:
        """Look up a prompt's blocks in storage, and snapshots where they are likely.

        These are the end of what is known of the prompt, where an earlier prompt may have ended,
        and the regular ones before it. Later ones make earlier ones superfluous.
        """
        waits = super().lookup(namespace, labels)
        if not self._ladder.unindexed():
            return waits
        known = self._match_path(namespace, labels)
        last = known.num_blocks // self._grain * self._grain
        regular = range((last - 1) // self._every * self._every, 0, -self._every)
        for at in (last, *regular[: MAX_COMPARED - 1]):
            path = self._path(labels, at)
            is_asked = at > 0 and begin_lookup(self._ladder, self._index, namespace, path)
            if is_asked or self._match_path(namespace, path).num_blocks == len(path):
                return waits or is_asked
        return waits

    # -- the life of a request --------------------------------------------------------------------

    def lease(self, namespace: bytes, labels: Sequence[Label], match: Match) -> Lease:
        assert isinstance(match, SnapshotMatch), "of this cache"
        lease = SnapshotLease(self._index, namespace, labels[:], match, self._clock(), self._size)
        self._leases.add(lease)
        return lease

    def transfer(self, lease: Lease, plan: Plan, num_blocks: int) -> bool:
        assert isinstance(lease, SnapshotLease), "of this cache"
        chosen = [
            snapshot
            for snapshot in lease.match.snapshots
            if snapshot.num_blocks == plan.num_reused_blocks
        ]
        for snapshot in chosen:  # one or none
            # First: what it holds can't be evicted for the request's other blocks.
            self._begin_from(lease, snapshot, self._labels)
        points = self._points(lease, plan.num_reused_blocks, num_blocks)
        num_slots = num_blocks + self._size * len(points)
        is_begun = super().transfer(lease, plan, num_slots)
        lease.num_blocks, lease.points = num_blocks, points
        for snapshot in chosen if is_begun else ():
            self._report_use(lease, snapshot.num_blocks)
            assert lease.start is not None, "it was made above"
            num_bytes = self._load(lease.start, snapshot.match)
            if num_bytes is None:
                return False
            lease.record.load_bytes += num_bytes
        return is_begun

    def _points(self, lease: SnapshotLease, first: int, num_blocks: int) -> list[int]:
        """Return where a request that begins after ``first`` blocks makes snapshots, ascending.

        If the device tier has too little room for all, those worth most are made: at the prompt's
        end, for its continuation, with a token left for its repetition; where it leaves what was
        known, because prompts do have that beginning in common; and the deepest of the regular
        ones.
        """
        grain, end = self._grain, self._last_point(lease)
        branch = min(lease.match.num_known // grain * grain, end)
        wanted: list[int] = []
        regular = range(end // self._every * self._every, first, -self._every)
        for at in (end, branch, *regular):
            near = self._every // 2 if at in regular else 1
            if at > first and all(abs(at - other) >= near for other in wanted):
                wanted.append(at)
        num_slots = self.num_slots()[DEVICE]
        room = (num_slots - num_blocks - self._size * (first > 0)) // self._size
        return sorted(wanted[: max(0, room)])

    def _report_use(self, lease: Lease, at: int) -> None:
        """Report to the policies that a request uses or has made a snapshot."""
        path, front = self._path(lease.labels, at), lease.blocks[at - 1]
        at_end = at >= self._last_point(lease)
        self._index.on_state(lease.namespace, path, at, front, at_end, self._clock())

    def _last_point(self, lease: Lease) -> int:
        """Return the number of blocks before a prompt's last snapshot.

        At least one token of the prompt is left to compute.
        """
        assert lease.decision is not None, "it is planned"
        longest = (lease.decision.num_tokens - 1) // self.group.block_size
        return min(len(lease.labels), longest) // self._grain * self._grain

    def follow(self, lease: Lease) -> LayerGate | None:
        """Return None: compute cannot start before the whole state is there."""
        return None

    def commit(self, lease: Lease, num_blocks: int) -> None:
        """Do the same as ``Cache.commit``, and add the snapshots up to there.

        The engine has written them.
        """
        super().commit(lease, num_blocks)
        assert isinstance(lease, SnapshotLease), "of this cache"
        self._end_start(lease)
        for at in [point for point in lease.points if point <= len(lease.blocks)]:
            if not lease.is_private:
                self._add(lease, at)
        self._check()

    def _add(self, lease: SnapshotLease, at: int) -> None:
        """Add a snapshot that the engine has written."""
        above = lease.blocks[at - 1]
        self._report_use(lease, at)
        state = self._add_state(lease, self._labels, lease.take_snapshot(at), above)
        if state is not None:
            lease.made.append(state)

    def release(self, lease: Lease, record: bool = True) -> None:
        if isinstance(lease, SnapshotLease) and not lease.released:
            for state in lease.made:
                state.is_private |= lease.is_private
        super().release(lease, record)
        if isinstance(lease, SnapshotLease):
            for state in lease.made:  # below the request's own blocks, which come first
                self._end(state)
            lease.made = []  # they refer to the lease

    # -- deletion and control ---------------------------------------------------------------------

    def delete(self, namespace: bytes, labels: Sequence[Label]) -> Deletion:
        for lease in self._leases:
            if isinstance(lease, SnapshotLease) and lease.labels[:1] == labels[:1]:
                for state in lease.made:
                    state.is_private |= lease.namespace == namespace
        return super().delete(namespace, labels)

    def stored(self, namespace: bytes, labels: Sequence[Label]) -> tuple[int, bool]:
        """Return how many of a prompt's first blocks are stored with a snapshot of their state.

        The second value is whether more are on their way.
        """
        num, is_coming = super().stored(namespace, labels)
        for at in range(num // self._grain * self._grain, 0, -self._grain):
            path = self._path(labels, at)
            found, comes = super().stored(namespace, path)
            is_coming |= comes
            if found == len(path):
                return at, is_coming
        return 0, is_coming


def _state_label(at: int) -> Label:
    """Return the label of a snapshot's block; no tokens have one of this length."""
    return b"state" + at.to_bytes(4, "little")
