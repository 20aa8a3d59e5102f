"""Prefix cache in which a cut needs a state beside the KV of its prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from kvtier.cache.lease import Lease
from kvtier.cache.states.lease import Snapshot, SnapshotMatch, StatefulLease, StateLease
from kvtier.cache.tokens import Cache
from kvtier.core.hot import Numbers
from kvtier.core.types import DEVICE, BlockId, GroupMatch, Label, Match, Slot
from kvtier.plan import Copy, Costs, Decision, plan_groups
from kvtier.plan.needs import GroupCapacity, coming_runs


class StatefulCache(Cache, ABC):
    """Cache whose matches are ``SnapshotMatch`` and whose leases are ``StatefulLease``.

    Attributes:
        state_blocks: blocks of a state, at most.
    """

    state_blocks: int

    def match(self, namespace: bytes, labels: Sequence[Label]) -> SnapshotMatch:
        known = self._match_path(namespace, labels)
        whole = SnapshotMatch(
            known.blocks, known.tiers, known.in_flight, known.num_asked, (), known.num_blocks
        )
        return whole.with_snapshots(self._snapshots(namespace, labels, known))

    def _match_path(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Return the cached prefix of a path, whether states are cached or not."""
        return super().match(namespace, labels)

    @abstractmethod
    def _snapshots(
        self, namespace: bytes, labels: Sequence[Label], known: Match
    ) -> Sequence[Snapshot]:
        """Return states along the known blocks of a prompt, the longest prefix first."""

    @abstractmethod
    def _state_at(self, lease: Lease, num_blocks: int) -> Snapshot | None:
        """Return the cached state after the lease's first ``num_blocks`` blocks, one or more."""

    def state_slots(self, lease: Lease, num_blocks: int) -> Sequence[Slot] | None:
        state = self._state_at(lease, num_blocks) if num_blocks else None
        if state is None or not state.is_on_device:
            return None if num_blocks else ()
        return self._index.slots(state.match.blocks, DEVICE)

    def _wanted(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        match = self.match(namespace, labels)
        if not match.snapshots:
            return match
        return joined([match, match.snapshots[0].match])

    def _match_with_unindexed(
        self, namespace: bytes, labels: Sequence[Label]
    ) -> tuple[Match, Sequence[str]]:
        """Return the cached prefix: the states of blocks that only storage knows are unknown."""
        match = self.match(namespace, labels)
        return match, self._ladder.unindexed() if match.num_blocks < len(labels) else ()

    def decide(
        self,
        match: Match,
        num_tokens: int,
        grain_blocks: int = 1,
        load: bool = True,
        costs: Costs | None = None,
        from_both_ends: bool = False,
    ) -> Decision:
        del from_both_ends  # where computing meets the load, there is no state to continue from
        assert isinstance(match, SnapshotMatch), "of this cache"
        size, num_bytes = self.group.block_size, self.group.bytes_per_block
        match = match if load else match.on_device()
        costs = costs or self._ladder.cost_snapshot(is_free=not self._weighs_costs)
        num_free, staging = self.num_available_slots, self._ladder.num_staging
        plan = plan_groups(
            self._over_groups(match),
            costs,
            [
                GroupCapacity(num_bytes, num_free, staging),
                GroupCapacity(
                    self.state_blocks * num_bytes,
                    num_free // self.state_blocks,
                    None if staging is None else staging // self.state_blocks,
                    num_last=1,
                ),
            ],
            num_tokens=num_tokens,
            block_size=size,
            grain_blocks=grain_blocks,
            deadline_s=self.config.load_deadline_s,
        )
        plan = replace(plan, copies=tuple(copy for copy in plan.copies if copy.group == 0))
        is_weighed = self._weighs_costs
        return Decision(match, costs, plan, num_tokens, size, num_bytes, grain_blocks, is_weighed)

    def _over_groups(self, match: SnapshotMatch) -> GroupMatch:
        """Return the match with snapshots as a second group, of which a cut needs the last one."""
        tiers: list[str | None] = [None] * match.num_blocks
        coming = [False] * match.num_blocks
        slowest_first = list(self._tiers)[::-1]
        for snapshot in match.snapshots:
            found = set(snapshot.match.tiers)
            tiers[snapshot.num_blocks - 1] = next(tier for tier in slowest_first if tier in found)
            coming[snapshot.num_blocks - 1] = all(snapshot.match.in_flight)
        return GroupMatch(
            match.blocks,
            (match.tiers, tuple(tiers)),
            (match.in_flight, tuple(coming)),
            [snapshot.num_blocks for snapshot in match.snapshots[::-1]],
            match.num_asked,
        )

    def _begin_from(
        self, lease: StatefulLease, snapshot: Snapshot, labels: Sequence[Label]
    ) -> StateLease:
        """Lease the state that a request begins from. labels: of its blocks."""
        lease.start = start = StateLease(
            self._index, lease.namespace, labels, snapshot.match, self._clock(), lease
        )
        self._leases.add(start)
        return start

    def _add_state(
        self,
        lease: StatefulLease,
        labels: Sequence[Label],
        ours: Sequence[Slot],
        above: BlockId | None = None,
    ) -> StateLease | None:
        """Add a state that the engine has written to the slots ``ours``, and lease it.

        Returns None if another transfer is filling the same blocks.

        labels: of its blocks. above: the block below which they begin; None for the root.
        """
        now = self._clock()
        made = self._index.insert(lease.namespace, labels, DEVICE, ours, now, above)
        num = len(made.blocks)
        twins = (slot for slot, used in zip(ours, made.slots, strict=False) if slot != used)
        self._ladder.free([*ours[num:], *twins])
        if not num:
            return None
        match = Match(made.blocks, (DEVICE,) * num, (False,) * num, num)
        state = StateLease(self._index, lease.namespace, labels[:num], match, now, lease)
        state.slots, state.stores = made.slots, lease.stores
        self._leases.add(state)
        self._index.touch(made.blocks, now)
        return state

    def _load(self, lease: StateLease, match: Match) -> int | None:
        """Begin to load a snapshot. Return the bytes to copy; None if there is no room for it.

        match: the blocks of the snapshot.
        """
        sources: dict[str, list[range]] = {}
        for kind, run in coming_runs(match.over_groups(), 0):
            if not kind.in_flight:
                sources.setdefault(kind.tier, []).append(run)
        num_copied = sum(len(run) for runs in sources.values() for run in runs)
        new_slots = self._ladder.allocate(num_copied) if num_copied else ()
        if new_slots is None:
            return None
        for tier, runs in sources.items():
            for run in runs:
                copy = Copy(tier, DEVICE, match.blocks[run.start : run.stop])
                self._ladder.load(copy, new_slots[: len(run)])
                new_slots = new_slots[len(run) :]
        lease.slots = self._index.slots(lease.blocks, DEVICE)
        self._ladder.wait_for(lease, lease.slots)
        lease.deadline = self._clock() + self.config.load_deadline_s
        self._loading[lease] = None
        self._index.touch(lease.blocks, self._clock())
        return num_copied * self.group.bytes_per_block

    def release(self, lease: Lease, record: bool = True) -> None:
        if isinstance(lease, StatefulLease) and not lease.released:
            self._end_start(lease)
        super().release(lease, record)

    def _end_start(self, lease: StatefulLease) -> None:
        """Release the snapshot that the request began from."""
        if lease.start is not None:
            lease.start.is_private |= lease.is_private
        self._end(lease.start)
        lease.start = None  # it refers to the lease

    def _end(self, state: StateLease | None) -> None:
        if state is not None:
            super().release(state, record=False)


def joined(matches: Sequence[Match]) -> Match:
    """Return the blocks of several matches as one."""
    return Match(
        Numbers.joined(*(match.blocks for match in matches)),
        tuple(tier for match in matches for tier in match.tiers),
        tuple(is_coming for match in matches for is_coming in match.in_flight),
        sum(match.num_asked for match in matches),
    )
