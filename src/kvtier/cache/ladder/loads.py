"""Loads towards the device, in pieces: one piece is copied to the device while the next is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvtier.cache.ladder.admission import Admission
from kvtier.cache.ladder.eviction import Eviction
from kvtier.cache.ladder.prefetch import PREFETCH_SHARE, Prefetch
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.transfer import Mover, Transfer
from kvtier.core.grouping import runs_of
from kvtier.core.hot import Numbers
from kvtier.core.types import BlockId, Match, Slot
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import PROBED_BLOCKS
from kvtier.plan import Copy, CostModel, num_to_probe

GROWTH = 4
"""A piece is at most 1/GROWTH of the blocks begun before it, so that copying starts early."""
SHARE = 64
"""A piece is at most 1/SHARE of a long load, since nothing is read while the last piece is copied
to the device. The number of pieces hardly grows with the load: 90 for a million tokens."""
DIRECT_PIECES = 4
"""Factor by which the pieces of a direct read are larger, since no second copy overlaps with it."""


def piece_sizes(num_blocks: int, first_blocks: int) -> Iterator[int]:
    """Yield the number of blocks in each piece of a load: ``first_blocks`` at first, more later.

    size = clamp(begun / GROWTH, first_blocks, max(first_blocks, num_blocks / SHARE))
    """
    most = max(first_blocks, num_blocks // SHARE)
    num_begun = 0
    while num_begun < num_blocks:
        size = min(max(first_blocks, num_begun // GROWTH), most, num_blocks - num_begun)
        num_begun += size
        yield size


@dataclass(eq=False)
class Loads:
    """Copies towards the fastest tier, for scheduled and for queued requests.

    first_blocks: size of the first piece of a read from storage, in blocks.
    block_bytes: bytes of a block.
    clock: seconds.
    """

    topology: Topology
    index: BlockIndex
    mover: Mover
    transfers: Transfers
    eviction: Eviction
    admission: Admission
    costs: CostModel
    metrics: Metrics
    clock: Callable[[], float]
    first_blocks: int
    block_bytes: int
    # time of the last probe of each tier
    _probed_s: dict[str, float] = field(init=False, default_factory=dict)
    # reads that no request waits for
    _ahead: set[Transfer] = field(init=False, default_factory=set)
    _prefetches: set[Prefetch] = field(init=False, default_factory=set)
    # blocks of all prefetches
    _num_prefetched: int = field(init=False, default=0)

    def load(self, copy: Copy, dst_slots: Sequence[Slot]) -> None:
        """Begin a plan's copy to the fastest tier, tier by tier or directly.

        It is cut into pieces, so that one is read while another is copied to the fastest tier.
        """
        between = self.topology.above(copy.src)
        if copy.src in self.topology.direct or between == self.topology.fastest:
            self.load_directly(copy, dst_slots)
            return
        blocks, rest = copy.blocks, copy.blocks[:0]
        if copy.src in self.topology.direct_at_need:
            room = self.eviction.num_available(self.topology.staging)
            blocks, rest = blocks[:room], blocks[room:]
        at = 0
        for leg, part in self.promote(blocks, copy.src):
            slots, at = dst_slots[at : at + len(part)], at + len(part)
            self.transfers.begin(Copy(between, copy.dst, part), slots, after=leg)
        if rest:
            self.load_directly(Copy(copy.src, copy.dst, rest), dst_slots[at:])

    def load_directly(self, copy: Copy, dst_slots: Sequence[Slot]) -> None:
        """Begin a copy that passes through no staging memory, in pieces."""
        at = 0
        for piece in self._pieces(copy, DIRECT_PIECES):
            slots, at = dst_slots[at : at + len(piece.blocks)], at + len(piece.blocks)
            self.transfers.begin(piece, slots)

    def _pieces(self, copy: Copy, times: int = 1) -> Iterator[Copy]:
        """Yield the pieces of a load.

        A load from storage has pieces, since each call has a deadline in seconds. A copy between
        memory tiers is one piece.
        """
        sizes: Iterator[int] = iter((len(copy.blocks),))
        if copy.src in self.topology.storages:
            sizes = piece_sizes(len(copy.blocks), times * self.first_blocks)
        at = 0
        for size in sizes:
            yield Copy(copy.src, copy.dst, copy.blocks[at : at + size])
            at += size

    def promote(
        self, blocks: Sequence[BlockId], src: str, urgent: bool = True
    ) -> list[tuple[Transfer, Sequence[BlockId]]]:
        """Begin to copy blocks one tier up, or join the transfers that are already in flight.

        Args:
            blocks: the blocks, in prompt order.
            src: the tier to copy from.
            urgent: whether a scheduled request waits for them.

        Returns:
            The transfers, each with the blocks that it brings, in the order given.
        """
        dst = self.topology.above(src)
        legs: list[tuple[Transfer, Sequence[BlockId]]] = []
        for state, run in runs_of(self.index.states_of(blocks, dst)):
            part = blocks[run.start : run.stop]
            if state is State.ABSENT:
                pieces = self._pieces(Copy(src, dst, part))
                legs += [(self._begin(piece, urgent), piece.blocks) for piece in pieces]
            else:
                legs += self._joined(part, dst, urgent)
        return legs

    def _joined(
        self, blocks: Sequence[BlockId], dst: str, urgent: bool
    ) -> Iterator[tuple[Transfer, Sequence[BlockId]]]:
        """Yield the transfers in flight that bring ``blocks``, each with its blocks."""
        for leg, run in self.transfers.in_flight.filling(self.index.slots(blocks, dst), dst):
            if urgent:
                self.transfers.hurry(leg)
            yield leg, blocks[run.start : run.stop]

    def _begin(self, copy: Copy, urgent: bool) -> Transfer:
        room = self.topology.allocators[copy.dst]
        if copy.dst == self.topology.staging:
            self.admission.admit_read(copy.blocks, copy.dst)
        self.eviction.make(copy.dst, len(copy.blocks) - room.num_free)
        slots = room.allocate(len(copy.blocks))
        if slots is None:
            return self.transfers.refuse(copy, "no room, everything there is in use")
        return self.transfers.begin(copy, slots, urgent=urgent)

    # -- reads ahead -------------------------------------------------------------------------------

    def fetch_ahead(self, match: Match, num_reused_blocks: int) -> None:
        """Read blocks that were not worth waiting for: a piece from idle storage, else a probe.

        The next request finds them in memory, and the planner learns how long a read takes now.
        """
        if num_reused_blocks == match.num_blocks:
            return
        topology = self.topology
        left = match.blocks[num_reused_blocks:], match.tiers[num_reused_blocks:]
        for name in topology.storages if topology.is_staged else ():
            blocks, num = _in_tier(name, *left), 0
            if name in topology.direct:
                num = self.num_to_probe(name, len(blocks))
            elif self.mover.is_idle(name):
                num = self.first_blocks
            room = min(num, self.eviction.num_available(topology.staging))
            self._ahead.update(leg for leg, _ in self.promote(blocks[:room], name, urgent=False))
        self._probe_memory(_in_tier(topology.staging, *left))

    def arrived(self, transfer: Transfer) -> None:
        """Copy a few blocks that were read ahead on to the fastest tier, as a probe.

        It may be the copies from memory that are believed to be slow. They begin only now: a
        request joins blocks that are in flight to the device, and would wait for storage.
        """
        if transfer in self._ahead:
            self._ahead.remove(transfer)
            self._probe_memory(transfer.blocks)

    def _probe_memory(self, blocks: Sequence[BlockId]) -> None:
        """Copy a few of the blocks in staging memory to the fastest tier, if a probe is due."""
        staging, fastest = self.topology.staging, self.topology.fastest
        if not blocks or staging == fastest or self.topology.above(staging) != fastest:
            return
        here = self.index.states_of(blocks, staging)
        there = self.index.states_of(blocks, fastest)
        some = [
            block
            for block, at, above in zip(blocks, here, there, strict=True)
            if at is State.READY and above is State.ABSENT
        ]
        num = self._take_probe(staging, fastest, len(some))
        num = min(num, self.eviction.num_available(fastest))
        self.promote(some[:num], staging, urgent=False)

    def num_to_probe(self, storage: str, num_declined: int) -> int:
        """Return how many blocks to read now from storage as a probe, and count them.

        num_declined: number of blocks there that are computed.
        """
        return self._take_probe(storage, self.topology.staging, num_declined)

    def _take_probe(self, src: str, dst: str, num_declined: int) -> int:
        """Return how many blocks to read now from ``src`` to ``dst``; see ``kvtier.plan.probe``.

        0 if no probe is due, or the tier is in use: then its reads renew the estimate.
        """
        route, now_s = (src, dst), self.clock()
        if not num_declined or self.transfers.in_flight.by_route.get(route):
            return 0
        if not self.mover.accepts(route):
            return 0
        last = self.costs.last_copy(route)
        if last is None and src not in self.mover.storages:
            return 0  # a copy that was never measured counts as free; storage may be read directly
        seen_s, last_s = last or (-inf, 0.0)
        quiet_s = now_s - max(seen_s, self._probed_s.get(src, -inf))
        num = num_to_probe(num_declined, self.block_bytes, quiet_s, last_s)
        if num:
            self._probed_s[src] = now_s
            self.metrics.count(PROBED_BLOCKS, num, src=src)
        return num

    # -- prefetches --------------------------------------------------------------------------------

    def prefetch(self, match: Match, deadline: float) -> Prefetch | None:
        """Begin to read the blocks of a match that only storage has, and hold all in memory.

        Returns None while other prefetches hold too much of that memory.
        """
        tier = self.topology.staging
        if tier == self.topology.fastest or not self.topology.storages:
            return Prefetch(self.index, tier, (), deadline)
        wanted: list[BlockId] = []
        for found_in, run in runs_of(match.tiers):
            if found_in == tier or found_in in self.topology.storages:
                wanted += match.blocks[run.start : run.stop]
        limit = int(self.topology.allocators[tier].num_open * PREFETCH_SHARE)
        if self._num_prefetched and self._num_prefetched + len(wanted) > limit:
            return None
        prefetch = Prefetch(self.index, tier, wanted[:limit], deadline)
        self._prefetches.add(prefetch)
        self._num_prefetched += len(prefetch.blocks)
        room = self.eviction.num_available(tier)
        for name in self.topology.storages:
            there = _in_tier(name, match.blocks, match.tiers)
            missing = [block for block in there if block in prefetch.blocks]
            for leg, part in self.promote(missing[:room], name, urgent=False):
                prefetch.wait_for(leg)
                room -= len(part)
        return prefetch

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Release a prefetch's blocks, and cancel its reads that no other request waits for."""
        if prefetch in self._prefetches:
            self._prefetches.remove(prefetch)
            self._num_prefetched -= len(prefetch.blocks)
        for transfer in prefetch.end():
            self.transfers.withdraw(transfer)


def _in_tier(tier: str, blocks: Sequence[BlockId], tiers: Sequence[str]) -> Sequence[BlockId]:
    """Return those of ``blocks`` that were found in ``tier``."""
    runs = [run for each, run in runs_of(tiers) if each == tier]
    return Numbers.joined(*(blocks[run.start : run.stop] for run in runs))
