"""The tiers as one ladder: room in each, copies between them, what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, takewhile

from kvtier.devices import Device
from kvtier.index import State, make_index
from kvtier.index.policies import EvictionPolicy
from kvtier.keys import next_key
from kvtier.plan import Copy
from kvtier.prefetch import Prefetch
from kvtier.telemetry import Metrics
from kvtier.tiers import MemoryTier, StorageTier, Tier
from kvtier.traffic import Traffic
from kvtier.types import DEVICE, BlockId, BlockKey, Label, Match, Slot
from kvtier.waiter import Transfer

STORABLE = (State.READY, State.EVICTING)
"""States in which a block's bytes can be copied to the tier below."""

PREFETCH_SHARE = 0.5
"""Of the host tier's open slots, what requests that wait for their turn may hold. The rest is for
those whose turn it is."""


class Ladder:
    """Slots, residencies and copies, kept in step.

    tiers: fastest first. make_policy: makes the eviction policy of each tier. demotes: blocks that
    leave the device go one tier down (write_back).
    patience_s: how long a demotion may hold up an eviction. archive_after_uses: when a block of the
    host tier is worth a write to storage. load_batch_bytes: what is read from storage in one piece.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        device: Device,
        *,
        make_policy: Callable[[], EvictionPolicy],
        demotes: bool,
        patience_s: float,
        archive_after_uses: int,
        load_batch_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = dict(tiers)
        self.index = make_index({name: make_policy() for name in tiers})
        self.metrics = Metrics()
        self.traffic = Traffic(self.tiers, self.index, device, self.metrics, clock)
        self._demotes = demotes
        self._patience_s = patience_s
        self._archive_after_uses = archive_after_uses
        self._blocks_per_piece = max(1, load_batch_bytes // self.pool.layout.group.bytes_per_block)
        self._clock = clock
        self._prefetches: set[Prefetch] = set()
        names, is_storage = list(tiers), [isinstance(tier, StorageTier) for tier in tiers.values()]
        first = is_storage.index(True) if any(is_storage) else None
        self._storage = None if first is None else names[first]
        # The tier that blocks from storage pass through on their way to the device.
        self._staging = names[first - 1] if first is not None and first > 1 else None
        self.archives = True
        """Whether anything is written to storage."""

    @property
    def pool(self) -> MemoryTier:
        """The device tier."""
        pool = self.tiers[DEVICE]
        assert isinstance(pool, MemoryTier)
        return pool

    def below(self, tier: str) -> str | None:
        """The next slower tier."""
        names = list(self.tiers)
        after = names.index(tier) + 1
        return names[after] if after < len(names) else None

    def above(self, tier: str) -> str:
        """The next faster tier."""
        names = list(self.tiers)
        return names[names.index(tier) - 1]

    # -- room -------------------------------------------------------------------------------------

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self.tiers[tier].num_free + self.index.num_evictable(tier)

    @property
    def num_staging_slots(self) -> int:
        """Blocks that could be brought from storage at a time: room for them on their way."""
        return 0 if self._staging is None else self.num_available(self._staging)

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """Device slots, after evicting what has to go; None when that is not enough.

        Attention reads neighbours in place and gathers anything else in every step, so where a
        tier below keeps copies, more is evicted until there is a run: at most twice ``num_slots``.
        """
        missing = num_slots - self.pool.num_free
        if missing > self.index.num_evictable(DEVICE):
            return None
        self.make_room(DEVICE, missing)
        budget = 2 * num_slots if self.below(DEVICE) else 0
        while budget > 0 and (short := num_slots - self.pool.longest_run()) > 0:
            more = min(budget, max(short, num_slots // 8))
            budget -= more
            if not self.make_room(DEVICE, more):
                break
        return self.pool.allocate(num_slots)

    def make_room(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        below = self.below(tier)
        if self._demotes and tier == DEVICE and below is not None:
            leaving = self._demote(self.index.evict(tier, num_blocks), tier, below)
            slots = self.index.forget_all(leaving, tier)
        else:
            slots = self.index.drop(tier, num_blocks)
        self.tiers[tier].free(slots)
        if slots:
            self.metrics.count("kvtier_evicted_blocks_total", len(slots), tier=tier)
        return len(slots)

    # -- copies -----------------------------------------------------------------------------------

    def load(self, copy: Copy, dst_slots: Sequence[Slot]) -> None:
        """Begin a plan's copy to the device, from tier to tier and in pieces, so that one is read
        while another is copied on."""
        between = self.above(copy.src)
        if between == DEVICE:
            self.traffic.begin(copy, dst_slots)
            return
        at = 0
        for leg, part in self.promote(copy.blocks, copy.src):
            slots, at = dst_slots[at : at + len(part)], at + len(part)
            self.traffic.begin(Copy(between, DEVICE, part), slots, after=leg)

    def promote(
        self, blocks: Sequence[BlockId], src: str, urgent: bool = True
    ) -> list[tuple[Transfer, tuple[BlockId, ...]]]:
        """Begin to copy blocks one tier up, where they are not on their way there already.

        urgent: somebody waits for them. Returns the transfers with the blocks that each brings, in
        the order given.
        """
        dst = self.above(src)
        legs: list[tuple[Transfer, tuple[BlockId, ...]]] = []
        for is_new, run in groupby(blocks, lambda block: self._is_absent(block, dst)):
            waiting = tuple(run)
            while waiting:
                if is_new:
                    part = waiting[: self._blocks_per_piece]
                    leg = self._begin_promotion(Copy(src, dst, part), urgent)
                else:
                    (leg,) = self.traffic.bringing(waiting[:1], dst)
                    if urgent:
                        self.traffic.hurry(leg)
                    part = tuple(takewhile(set(leg.blocks).__contains__, waiting))
                legs.append((leg, part))
                waiting = waiting[len(part) :]
        return legs

    def fetch_ahead(self, match: Match, num_reused_blocks: int) -> None:
        """Read a piece of what was not worth waiting for, where storage has nothing else to do: the
        next request finds it in host memory, and the planner learns how long a read takes now."""
        name = self._storage
        if name is not None and self._staging is not None and self.traffic.is_idle(name):
            left = match.blocks[num_reused_blocks:], match.tiers[num_reused_blocks:]
            there = [block for block, tier in zip(*left, strict=True) if tier == name]
            room = min(self._blocks_per_piece, self.num_available(self._staging))
            self.promote(there[:room], name, urgent=False)

    def prefetch(self, match: Match, deadline: float) -> Prefetch | None:
        """Begin to read what only storage has of a match, and hold it in host memory together with
        what is there already. None while others hold too much of that memory."""
        name, staging = self._storage, self._staging
        if name is None or staging is None:
            return Prefetch(self.index, DEVICE, (), deadline)  # there is nothing to read
        there = list(zip(match.blocks, match.tiers, strict=True))
        wanted = [block for block, tier in there if tier in (staging, name)]
        limit = int(self.tiers[staging].num_open * PREFETCH_SHARE)
        num_held = sum(len(each.blocks) for each in self._prefetches)
        if num_held and num_held + len(wanted) > limit:
            return None
        prefetch = Prefetch(self.index, staging, wanted[:limit], deadline)
        missing = [block for block, tier in there if tier == name and block in prefetch.blocks]
        room = self.num_available(staging)
        for leg, _ in self.promote(missing[:room], name, urgent=False):
            prefetch.wait_for(leg)
        self._prefetches.add(prefetch)
        return prefetch

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Hold its blocks no longer; what was not begun and nobody else wants is not read."""
        self._prefetches.discard(prefetch)
        for transfer in prefetch.end():
            self.traffic.withdraw(transfer)

    def _begin_promotion(self, copy: Copy, urgent: bool) -> Transfer:
        room = self.tiers[copy.dst]
        self.make_room(copy.dst, len(copy.blocks) - room.num_free)
        slots = room.allocate(len(copy.blocks))
        if slots is None:
            return self.traffic.refuse(copy, "no room, everything there is in use")
        return self.traffic.begin(copy, slots, urgent=urgent)

    def _is_absent(self, block: BlockId, tier: str) -> bool:
        return self.index.state(block, tier) is State.ABSENT

    def store(self, blocks: Sequence[BlockId], src: str = DEVICE, num_there: int = 0) -> int:
        """Copy blocks one tier down where they are not there yet, as far as there is room.

        blocks: consecutive, in prompt order. num_there: how many of the first ones were there after
        the last call, to spare looking at them again.
        Returns how many of the first ones are there now, or on their way.
        """
        dst = self.below(src)
        if dst is None:
            return 0
        if num_there and self.index.state(blocks[num_there - 1], dst) is State.ABSENT:
            num_there = 0  # evicted meanwhile
        there = self.index.states_of(blocks[num_there:], dst)
        here = self.index.states_of(blocks[num_there:], src)
        missing = [
            at
            for at, (below, above) in enumerate(zip(there, here, strict=True), num_there)
            if below is State.ABSENT and above in STORABLE
        ]
        if not missing:
            return len(blocks)
        self._make_room_for([blocks[at] for at in missing], dst)
        slots = self.tiers[dst].allocate(min(len(missing), self.tiers[dst].num_free)) or []
        if slots:
            fits = tuple(blocks[at] for at in missing[: len(slots)])
            self.traffic.begin(Copy(src, dst, fits), slots)
        if len(slots) < len(missing):
            refused = len(missing) - len(slots)
            self.metrics.count("kvtier_refused_blocks_total", refused, tier=dst)
            return missing[len(slots)]
        return len(blocks)

    def _make_room_for(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Evict from ``tier`` what has to go for ``blocks``, but not the prefixes that they
        continue: the end of a prompt must not push out its beginning."""
        lacking = len(blocks) - self.tiers[tier].num_free
        if lacking > 0:
            prefixes = self.index.prefixes(blocks, tier)
            self.index.lease(prefixes, tier)
            self.make_room(tier, lacking)
            self.index.release(prefixes, tier)

    def archive(self, blocks: Sequence[BlockId]) -> None:
        """Write blocks of the host tier to the storage below it: those worth a write by now."""
        name, staging = self._storage, self._staging
        if name is None or staging is None or not self.archives:
            return
        storage = self.tiers[name]
        assert isinstance(storage, StorageTier)
        there = self.index.states_of(blocks, name)
        here = self.index.states_of(blocks, staging)
        wanted = [
            block
            for block, below, above in zip(blocks, there, here, strict=True)
            if below is State.ABSENT
            and above is State.READY
            and self.index.num_uses(block) >= self._archive_after_uses
            and not self._claimed(block, name, storage)
        ]
        if wanted:
            self.store(wanted[: storage.num_welcome(len(wanted))], staging)

    def archive_all(self) -> None:
        """``archive`` what the host tier has, in pieces."""
        if self._storage is not None:
            there = [node.block for node in self.index.nodes()]
            for at in range(0, len(there), self._blocks_per_piece):
                self.archive(there[at : at + self._blocks_per_piece])

    def _claimed(self, block: BlockId, name: str, storage: StorageTier) -> bool:
        """Whether storage has had the block since an earlier life; the index knows it now."""
        slots = storage.claim([self.index.key(block)]) if storage.num_unclaimed else []
        if slots:
            self.index.begin_write(block, name, slots[0])
            self.index.commit(block, name, self._clock())
        return bool(slots)

    def recall(self, namespace: bytes, labels: Sequence[Label]) -> None:
        """Take into the index what storage has kept of this prompt since an earlier life."""
        for name, tier in self.tiers.items():
            if not isinstance(tier, StorageTier) or not tier.num_unclaimed:
                continue
            known = self.index.match(namespace, labels).blocks
            above = known[-1] if known else None
            keys = [namespace if above is None else self.index.key(above)]
            for label in labels[len(known) : len(labels)]:
                keys.append(next_key(keys[-1], label))
            slots = tier.claim([BlockKey(key) for key in keys[1:]])
            found = labels[len(known) : len(known) + len(slots)]
            path = self.index.extend(namespace, found, above)
            new = []
            for block, slot in zip(path, slots, strict=True):
                if self._is_absent(block, name):
                    self.index.begin_write(block, name, slot)
                    new.append(block)
                else:
                    tier.free([slot])
            self.index.commit_all(new, name, self._clock())

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. True if there was one. Never waits."""
        finished = self.traffic.poll()
        for transfer in finished:
            if transfer.src == DEVICE:
                self.archive(transfer.blocks)
        self.traffic.drop_lost()
        self.traffic.scrub()
        return bool(finished)

    def _demote(self, leaving: list[BlockId], src: str, dst: str) -> list[BlockId]:
        """Copy blocks that are being evicted one tier down, and wait. Returns those that may go.

        Blocks nearest to the root are worth most, and go first where ``dst`` has not room for all.
        """
        before = len(self.traffic.transfers)
        self.store(leaving[::-1], src)
        for transfer in self.traffic.transfers[before:]:
            assert transfer.job is not None
            if transfer.job.wait(self._patience_s):
                self.traffic.finish(transfer)
                self.archive(transfer.blocks)
                continue
            for block in transfer.blocks:  # still being read: it has to stay
                self.index.keep(block, src)
            self.index.lease(transfer.blocks, src)
            transfer.holds_source = True
            staying = set(transfer.blocks)
            leaving = [block for block in leaving if block not in staying]
        return leaving

    # -- upkeep -----------------------------------------------------------------------------------

    def used_slots(self) -> dict[str, int]:
        """Slots in use per tier."""
        return {name: tier.num_used for name, tier in self.tiers.items()}

    def num_slots(self) -> dict[str, int]:
        """Slots in all per tier."""
        return {name: tier.num_slots for name, tier in self.tiers.items()}

    def close(self) -> None:
        """Finish what is on its way, then give the tiers back."""
        in_use = self.traffic.close()
        for name, tier in self.tiers.items():
            if name not in in_use:
                tier.close()

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError where slots and blocks don't add up. num_private: device slots that
        requests use and the index does not know."""
        self.index.check_invariants()
        for name, in_use in self.used_slots().items():
            expected = self.index.num_held(name) + (num_private if name == DEVICE else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"
