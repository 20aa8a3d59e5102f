"""The tiers as one ladder: room in each, copies between them, what leaves when one is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from kvtier.archive import Archive
from kvtier.index import State, make_index
from kvtier.index.policies import EvictionPolicy
from kvtier.plan import Copy, WriteBudget, ways_of
from kvtier.prefetch import Prefetch
from kvtier.recall import Recall
from kvtier.telemetry import Metrics
from kvtier.tiers import Room
from kvtier.traffic import OnChange, Traffic
from kvtier.transfer import Mover
from kvtier.types import BlockId, BlockKey, BlockName, Label, Match, Slot
from kvtier.waiter import Transfer

STORABLE = (State.READY, State.EVICTING)
"""States in which a block's bytes can be copied to the tier below."""

PREFETCH_SHARE = 0.5
"""Of the open slots that storage is read into, what requests that wait for their turn may hold. The
rest is for those whose turn it is."""


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """How the ladder behaves.

    block_bytes: of one block. demotes: blocks that leave the fastest tier go one down (write_back).
    patience_s: how long that may hold up an eviction. archive_after_uses: when a block in memory is
    worth a write to storage. bytes_per_day: what may be written to a storage tier, 0 or none for no
    limit. piece_blocks: what is read from storage, or written, at a time.
    """

    block_bytes: int
    demotes: bool = False
    patience_s: float = 1.0
    archive_after_uses: int = 1
    bytes_per_day: Mapping[str, int] = field(default_factory=dict)
    piece_blocks: int = 64


class Ladder:
    """Slots, residencies and copies, kept in step.

    rooms: of the tiers in memory and then of those in storage, fastest first. Storage is read into
    the slowest memory tier and written from there; several storage tiers stand beside each other.
    mover: does what is decided here. make_policy: makes the eviction policy of each tier. device:
    memory above the fastest tier, where an engine copies to it and from it by itself.
    """

    def __init__(
        self,
        rooms: Mapping[str, Room],
        mover: Mover,
        *,
        make_policy: Callable[[], EvictionPolicy],
        options: LadderOptions,
        clock: Callable[[], float],
        device: str | None = None,
    ) -> None:
        self.rooms = dict(rooms)
        self.mover = mover
        self.storages = [name for name in rooms if name in mover.storages]
        self._memories = [name for name in rooms if name not in mover.storages]
        self.fastest, self.staging = self._memories[0], self._memories[-1]
        self.index = make_index({name: make_policy() for name in rooms})
        self.metrics = Metrics()
        memories = self._memories if device is None else [device, *self._memories]
        ways = ways_of(memories, self.storages, self.storages)
        self.traffic = Traffic(self.rooms, ways, self.index, mover, self.metrics, clock)
        self._options = options
        self._clock = clock
        self.archives = True
        """Whether anything is written to storage; what would be waits, as long as it stays."""
        self._prefetches: set[Prefetch] = set()
        self._recall = Recall(self.index, mover)
        self._archives = {
            name: Archive(
                name,
                self.staging,
                self.rooms[self.staging],
                self.index,
                self.metrics,
                options.block_bytes,
                WriteBudget(options.bytes_per_day.get(name, 0), clock=clock),
            )
            for name in self.storages
        }

    def listen(self, name_of: Callable[[BlockId], BlockName], on_change: OnChange) -> None:
        """Somebody knows better what blocks are called in storage, and wants to know what comes and
        goes."""
        self.traffic.name_of, self.traffic.on_change = name_of, on_change

    def above(self, tier: str) -> str:
        """The tier that blocks are copied to from ``tier``, towards the fastest one."""
        if tier in self._archives:
            return self.staging
        return self._memories[self._memories.index(tier) - 1]

    def below(self, tier: str) -> str | None:
        """The next slower tier in memory."""
        after = self._memories.index(tier) + 1
        return self._memories[after] if after < len(self._memories) else None

    # -- room -------------------------------------------------------------------------------------

    def num_available(self, tier: str) -> int:
        """Slots of ``tier`` that are free or could be had by eviction. An upper bound."""
        return self.rooms[tier].num_free + self.index.num_evictable(tier)

    @property
    def num_staging_slots(self) -> int | None:
        """Blocks that could be brought from storage at a time: room for them on their way. None
        where they come straight to where they are needed."""
        return None if self.staging == self.fastest else self.num_available(self.staging)

    def allocate(self, num_slots: int) -> list[Slot] | None:
        """Slots of the fastest tier, after evicting what has to go; None when that is not enough.

        Attention reads neighbours in place and gathers anything else in every step, so where a
        tier below keeps copies, more is evicted until there is a run: at most twice ``num_slots``.
        """
        tier, room = self.fastest, self.rooms[self.fastest]
        missing = num_slots - room.num_free
        if missing > self.index.num_evictable(tier):
            return None
        self.make_room(tier, missing)
        budget = 2 * num_slots if self.below(tier) else 0
        while budget > 0 and (short := num_slots - room.longest_run()) > 0:
            more = min(budget, max(short, num_slots // 8))
            budget -= more
            if not self.make_room(tier, more):
                break
        return room.allocate(num_slots)

    def make_room(self, tier: str, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks from ``tier``, leaves first. Returns how many left."""
        if self._leaves_unnoticed(tier):
            slots = self.index.drop(tier, num_blocks)
        else:
            slots = self._leave(self.index.evict(tier, max(0, num_blocks)), tier)
        self.rooms[tier].free(slots)
        if slots:
            self.metrics.count("kvtier_evicted_blocks_total", len(slots), tier=tier)
        return len(slots)

    def _leaves_unnoticed(self, tier: str) -> bool:
        """What leaves ``tier`` goes nowhere, and nobody wants to know of it."""
        is_noticed = self.traffic.on_change is not None or tier in self._archives
        return not is_noticed and not self._demotes(tier)

    def _demotes(self, tier: str) -> bool:
        return self._options.demotes and tier == self.fastest and self.below(tier) is not None

    def _leave(self, leaving: list[BlockId], tier: str, for_good: bool = False) -> list[Slot]:
        """Blocks are being evicted. Returns the slots that are free now."""
        if self._demotes(tier):
            leaving = self._demote(leaving, tier)
        if self.traffic.on_change is not None:
            self.traffic.on_change(tier, leaving, True)
        if leaving and tier in self._archives and (for_good or not self._evicts(tier)):
            self.mover.drop(tier, [self._key(block) for block in leaving], for_good)
        return self.index.forget_all(leaving, tier)

    def _key(self, block: BlockId) -> BlockKey:
        return self.traffic.name_of(block).key

    def _evicts(self, storage: str) -> bool:
        return self.mover.storages[storage].evicts

    def reserve(self, num_slots: int, but_not: Sequence[BlockId]) -> list[Slot] | None:
        """Slots of the fastest tier for an engine that fills them itself, after evicting others
        than ``but_not``; None where there are too few, and nothing left then."""
        tier, room = self.fastest, self.rooms[self.fastest]
        self.index.lease(but_not, tier)
        missing = num_slots - room.num_free
        if missing <= self.index.num_evictable(tier):
            self.make_room(tier, missing)
        self.index.release(but_not, tier)
        return room.allocate(num_slots)

    def lose(self, block: BlockId, tier: str) -> None:
        """What ``tier`` has of a block is wrong: it goes as soon as nobody holds it."""
        self.traffic.lose(block, tier)

    def give_back(self, slots: list[Slot]) -> None:
        """Slots of the fastest tier that ``reserve`` gave, and nothing came to be in."""
        self.rooms[self.fastest].free(slots)

    def clear(self) -> None:
        """Forget every block that nobody holds, in storage as well and for good. What is on its way
        arrives nowhere."""
        self.traffic.void()
        for archive in self._archives.values():
            archive.clear()
        for tier, room in self.rooms.items():
            leaving = self.index.evict(tier, self.index.num_held(tier))
            room.free(self._leave(leaving, tier, for_good=True))
        for storage in self.storages:
            self.mover.drop_unfound(storage)

    # -- copies -----------------------------------------------------------------------------------

    def load(self, copy: Copy, dst_slots: Sequence[Slot]) -> None:
        """Begin a plan's copy to the fastest tier, from tier to tier and in pieces, so that one is
        read while another is copied on."""
        between = self.above(copy.src)
        if between == self.fastest:
            # A storage tier is given seconds per call: it should not get all at once.
            step = self._options.piece_blocks if copy.src in self._archives else len(copy.blocks)
            for at in range(0, len(copy.blocks), step):
                piece = Copy(copy.src, copy.dst, copy.blocks[at : at + step])
                self.traffic.begin(piece, dst_slots[at : at + step])
            return
        at = 0
        for leg, part in self.promote(copy.blocks, copy.src):
            slots, at = dst_slots[at : at + len(part)], at + len(part)
            self.traffic.begin(Copy(between, copy.dst, part), slots, after=leg)

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
                    part = waiting[: self._options.piece_blocks]
                    leg = self._begin_promotion(Copy(src, dst, part), urgent)
                else:
                    (leg,) = self.traffic.bringing(waiting[:1], dst)
                    if urgent:
                        self.traffic.hurry(leg)
                    part = tuple(takewhile(set(leg.blocks).__contains__, waiting))
                legs.append((leg, part))
                waiting = waiting[len(part) :]
        return legs

    def _begin_promotion(self, copy: Copy, urgent: bool) -> Transfer:
        room = self.rooms[copy.dst]
        self.make_room(copy.dst, len(copy.blocks) - room.num_free)
        slots = room.allocate(len(copy.blocks))
        if slots is None:
            return self.traffic.refuse(copy, "no room, everything there is in use")
        return self.traffic.begin(copy, slots, urgent=urgent)

    def _is_absent(self, block: BlockId, tier: str) -> bool:
        return self.index.state(block, tier) is State.ABSENT

    def fetch_ahead(self, match: Match, num_reused_blocks: int) -> None:
        """Read a piece of what was not worth waiting for, where storage has nothing else to do: the
        next request finds it in memory, and the planner learns how long a read takes now."""
        if self.staging == self.fastest:
            return
        left = match.blocks[num_reused_blocks:], match.tiers[num_reused_blocks:]
        for name in self.storages:
            if self.mover.is_idle(name):
                there = [block for block, tier in zip(*left, strict=True) if tier == name]
                room = min(self._options.piece_blocks, self.num_available(self.staging))
                self.promote(there[:room], name, urgent=False)

    def prefetch(self, match: Match, deadline: float) -> Prefetch | None:
        """Begin to read what only storage has of a match, and hold it in memory together with what
        is there already. None while others hold too much of that memory."""
        tier = self.staging
        if tier == self.fastest or not self.storages:
            return Prefetch(self.index, tier, (), deadline)
        there = list(zip(match.blocks, match.tiers, strict=True))
        wanted = [block for block, at in there if at == tier or at in self._archives]
        limit = int(self.rooms[tier].num_open * PREFETCH_SHARE)
        num_held = sum(len(each.blocks) for each in self._prefetches)
        if num_held and num_held + len(wanted) > limit:
            return None
        prefetch = Prefetch(self.index, tier, wanted[:limit], deadline)
        room = self.num_available(tier)
        for name in self.storages:
            missing = [block for block, at in there if at == name and block in prefetch.blocks]
            for leg, part in self.promote(missing[:room], name, urgent=False):
                prefetch.wait_for(leg)
                room -= len(part)
        self._prefetches.add(prefetch)
        return prefetch

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Hold its blocks no longer; what was not begun and nobody else wants is not read."""
        self._prefetches.discard(prefetch)
        for transfer in prefetch.end():
            self.traffic.withdraw(transfer)

    def store(self, blocks: Sequence[BlockId], src: str, num_there: int = 0) -> int:
        """Copy blocks one memory tier down where they are not there yet, as far as there is room.

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
        num_begun = self._copy_down([blocks[at] for at in missing], src, dst)
        return missing[num_begun] if num_begun < len(missing) else len(blocks)

    def _copy_down(self, blocks: Sequence[BlockId], src: str, dst: str) -> int:
        """Begin to copy the first of ``blocks``, as many as there is room for. Returns how many."""
        if not blocks:
            return 0
        self._make_room_for(blocks, dst)
        room = self.rooms[dst]
        slots = room.allocate(min(len(blocks), room.num_free)) or []
        if slots:
            self.traffic.begin(Copy(src, dst, tuple(blocks[: len(slots)])), slots)
        self._count_refused(len(blocks) - len(slots), dst)
        return len(slots)

    def _count_refused(self, num_blocks: int, tier: str) -> None:
        if num_blocks:
            self.metrics.count("kvtier_refused_blocks_total", num_blocks, tier=tier)

    def _make_room_for(self, blocks: Sequence[BlockId], tier: str) -> None:
        """Evict from ``tier`` what has to go for ``blocks``, but not the prefixes that they
        continue: the end of a prompt must not push out its beginning."""
        lacking = len(blocks) - self.rooms[tier].num_free
        if lacking > 0:
            prefixes = self.index.prefixes(blocks, tier)
            self.index.lease(prefixes, tier)
            self.make_room(tier, lacking)
            self.index.release(prefixes, tier)

    # -- storage ----------------------------------------------------------------------------------

    def archive(self, blocks: Sequence[BlockId]) -> None:
        """Have blocks written to storage: those in memory that are worth a write by now."""
        uses = self._options.archive_after_uses
        for name, archive in self._archives.items():
            there = self.index.states_of(blocks, name)
            here = self.index.states_of(blocks, self.staging)
            archive.add(
                block
                for block, below, above in zip(blocks, there, here, strict=True)
                if below is State.ABSENT
                and above is State.READY
                and self.index.num_uses(block) >= uses
            )
            self._write(archive)

    def _write(self, archive: Archive) -> None:
        """Begin the writes whose turn has come."""
        while self.archives and (wanted := archive.take(self._options.piece_blocks)):
            new = [block for block in wanted if not self._was_there(block, archive.storage)]
            num_begun = 0
            if self.mover.accepts((self.staging, archive.storage)):
                num_begun = self._copy_down(new, self.staging, archive.storage)
            else:  # nothing leaves for what would not arrive
                self._count_refused(len(new), archive.storage)
            archive.ended(len(wanted) - num_begun)

    def _was_there(self, block: BlockId, storage: str) -> bool:
        """Whether storage has had the block since an earlier life; the index knows it then."""
        if not self._is_asked_at_once(storage):
            return False
        is_there = bool(self.mover.find(storage, [self._key(block)]).places_there)
        return is_there and self._adopt(storage, [block]) == 1

    def _is_asked_at_once(self, storage: str) -> bool:
        return self.mover.storages[storage].finds_at_once and self.mover.has_unfound(storage)

    @property
    def has_unfound(self) -> bool:
        """Whether storage may have blocks that nobody has found yet."""
        return any(self.mover.has_unfound(name) for name in self.storages)

    def recall_each(
        self, namespace: bytes, labels: Sequence[Label], keys: Sequence[BlockKey]
    ) -> int:
        """``recall`` of blocks that hang under no other, from storage that answers at once. Returns
        how many are known now. keys: what the blocks are called there."""
        num_known = 0
        for name in self.storages:
            if self._is_asked_at_once(name):
                there = self.mover.find(name, keys).places_there
                blocks = [self.index.extend(namespace, [labels[at]])[0] for at in there]
                num_known += self._adopt(name, blocks)
        return num_known

    def is_archiving(self, block: BlockId) -> bool:
        """Whether a block waits for its write to storage, or is being written."""
        return any(
            block in archive or self.index.state(block, name) is State.WRITING
            for name, archive in self._archives.items()
        )

    def recall(self, namespace: bytes, labels: Sequence[Label]) -> None:
        """Take into the index what storage has kept of this prompt since an earlier life, or has
        from another process. Where it has to be asked first, that is for the next time."""
        if self.storages:
            self._recall.ask(namespace, labels)
            self._hear()

    def _hear(self) -> None:
        """Take in what storage has answered."""
        for storage, path in self._recall.take_answers():
            self._adopt(storage, path)

    def _adopt(self, storage: str, path: Sequence[BlockId]) -> int:
        """Blocks were found: they are in ``storage`` from now on, as far as there is room for them.
        Returns how many."""
        new = [block for block in path if self._is_absent(block, storage)]
        room = self.rooms[storage]
        self.make_room(storage, len(new) - room.num_free)
        slots = room.allocate(min(len(new), room.num_free)) or []
        there, too_many = new[: len(slots)], new[len(slots) :]
        self.index.begin_write_all(there, storage, slots)
        self.index.commit_all(there, storage, self._clock())
        self._leave_unfound(storage, too_many)
        if there and self.traffic.on_change is not None:
            self.traffic.on_change(storage, there, False)
        return len(there)

    def _leave_unfound(self, storage: str, blocks: Sequence[BlockId]) -> None:
        """There is no room for blocks that were found: storage forgets them, and so does the index,
        by a write that does not come about."""
        if blocks:
            self.mover.drop(storage, [self._key(block) for block in blocks])
            self.index.begin_write_all(blocks, storage, [Slot(0)] * len(blocks))
            self.index.abort_all(blocks, storage)

    def poll(self) -> bool:
        """Finish the transfers whose copy is done. True if there was one. Never waits."""
        finished = self.traffic.poll()
        for transfer in finished:
            if transfer.dst in self._archives:
                self._archives[transfer.dst].ended(len(transfer.blocks))
            elif transfer.dst == self.staging and transfer.src not in self._archives:
                self.archive(transfer.blocks)
        for archive in self._archives.values():
            self._write(archive)
        self._hear()
        self.traffic.drop_lost()
        self.traffic.scrub()
        return bool(finished)

    @property
    def is_busy(self) -> bool:
        """Something is on its way, or should be; not what is late, nor what waits behind it."""
        waits = self.archives and any(
            len(archive) and self.mover.accepts((self.staging, name))
            for name, archive in self._archives.items()
        )
        return waits or any(not transfer.is_late for transfer in self.traffic.transfers)

    def _demote(self, leaving: list[BlockId], src: str) -> list[BlockId]:
        """Copy blocks that are being evicted one tier down, and wait. Returns those that may go.

        Blocks nearest to the root are worth most, and go first where there is not room for all.
        """
        before = len(self.traffic.transfers)
        self.store(leaving[::-1], src)
        for transfer in self.traffic.transfers[before:]:
            assert transfer.job is not None
            if transfer.job.wait(self._options.patience_s):
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
        return {name: room.num_used for name, room in self.rooms.items()}

    def num_slots(self) -> dict[str, int]:
        """Slots in all per tier."""
        return {name: room.num_slots for name, room in self.rooms.items()}

    def close(self) -> set[str]:
        """Finish what is on its way. Returns the tiers that are in use all the same."""
        return self.traffic.close()

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError where slots and blocks don't add up. num_private: slots of the
        fastest tier that requests use and the index does not know."""
        self.index.check_invariants()
        for name, in_use in self.used_slots().items():
            expected = self.index.num_held(name) + (num_private if name == self.fastest else 0)
            assert in_use == expected, f"{name}: {in_use} slots in use, {expected} accounted for"
