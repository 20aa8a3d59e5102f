"""Prefix cache for models with sliding windows: what a window has passed is freed on the device.

The blocks of a prompt's path hold the KV of the layers that attend to all tokens. The KV of the
layers with a window is stored by cells: one per chunk, with the chunk's last tokens that a window
reaches. To continue after a cut, a model needs the path, and the cells in reach:

    path    kv 0 - kv 1 - kv 2 - kv 3 - kv 4 - kv 5 - kv 6 - kv 7 | cut
    cells   [ cell 2 ]    [ cell 4 ]    [ cell 6 ]    [ cell 8 ]
                                        |<------ window ------>|

A cell is a short path of its own, of blocks of the same size. Its first label has the key of the
prompt's block that it ends with. So tiers, policies and storage know one kind of block, and each
cell is used, evicted and found by itself.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.cache.deletion import Deletion
from kvtier.cache.lease import Lease
from kvtier.cache.states.lease import Snapshot, SnapshotMatch, WindowLease
from kvtier.cache.states.stateful import StatefulCache, joined
from kvtier.cache.token_lookup import begin_lookup
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import LayerGate
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.grouping import runs_of
from kvtier.core.hints import Hint, HintResult
from kvtier.core.keys import keys_along, next_keys
from kvtier.core.types import DEVICE, HOST, BlockId, BlockKey, Label, Match, Slot
from kvtier.devices import Device
from kvtier.index import State
from kvtier.observe.block_events import BlockLog
from kvtier.plan import Plan
from kvtier.tiers import ArenaOptions, DeviceTier, StorageTier

MAX_COMPARED = 4
"""Cuts that the planner compares for each run of blocks in one tier, and runs."""

MAX_SEARCHED = 256
"""Chunks of a prompt among which a possible cut is searched, the last ones."""

MAX_LOOKED_UP = 16
"""Cells beyond a window that are looked up in storage for one prompt."""


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Sizes of the window KV of one model, in blocks.

    Attributes:
        window: tokens that a layer attends to, at most, itself included.
        num_bundles: blocks that hold the window KV of as many tokens as one block has.
        block_size: tokens per block.
        grain_blocks: blocks of a chunk.
    """

    window: int
    num_bundles: int
    block_size: int
    grain_blocks: int

    @property
    def num_needed(self) -> int:
        """Blocks before a cut whose window KV it needs; one at least."""
        return max(1, -(-(self.window - 1) // self.block_size))

    @property
    def num_cells(self) -> int:
        """Cells that a cut needs, at most."""
        return -(-self.num_needed // self.grain_blocks)

    @property
    def blocks_of_prompt(self) -> int:
        """Blocks of the prompt whose window KV a cell has, the last ones of its chunk."""
        return min(self.num_needed, self.grain_blocks)

    @property
    def blocks_per_cell(self) -> int:
        return self.num_bundles * self.blocks_of_prompt

    def ring_blocks(self, num_blocks: int) -> int:
        """Return the blocks of window KV of a running sequence of ``num_blocks`` blocks.

        They hold what a window reaches before a chunk, and the chunk.
        """
        return self.num_bundles * min(num_blocks, self.num_needed + self.grain_blocks)

    def most_blocks(self, num_blocks: int) -> int:
        """Return the device blocks that a sequence of ``num_blocks`` blocks needs, at most.

        While a prefix is loaded, its cells are there beside the ring.
        """
        num_cells = min(self.num_cells, num_blocks // self.grain_blocks)
        return num_blocks + self.ring_blocks(num_blocks) + num_cells * self.blocks_per_cell

    def room(self, pool_blocks: int) -> int:
        """Return the blocks of the longest sequence that a pool has room for."""
        return bisect_right(range(pool_blocks + 1), pool_blocks, key=self.most_blocks) - 1

    def ends_in_reach(self, cut: int) -> range:
        """Return after how many blocks the cells end that a cut needs, the last one first."""
        grain = self.grain_blocks
        return range(cut, max(0, cut - self.num_cells * grain), -grain)


class WindowCache(StatefulCache):
    """A prefix cache over the engine's device pool, for a model with sliding windows.

    A request has a ring of blocks (``Lease.ring``) for the window KV of its last tokens, and no
    more. The engine copies each chunk's window KV into a cell (``Lease.snapshot_slots``), and
    commits after each chunk. A cell that a request has passed is evicted from the device once it is
    in the tier below.

    Args:
        config, device, pool, clock, storage, arena, events, names_codec: as in ``Cache``.
        shape: sizes of the window KV.
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
        shape: WindowShape,
    ) -> None:
        super().__init__(config, device, pool, clock, storage, arena, events, names_codec)
        if shape.block_size != self.group.block_size:
            raise ConfigError(
                f"shape: block_size={shape.block_size}, but the pool's is {self.group.block_size}"
            )
        self._shape = shape
        self._size = shape.blocks_per_cell
        self._rest = [_cell_label(at) for at in range(1, self._size)]
        self.state_blocks = shape.num_cells * self._size

    def _cell(self, key: BlockKey) -> list[Label]:
        """Return the labels of the cell at the end of a prefix. key: of the prefix's last block."""
        return [_cell_label(0) + key, *self._rest]

    # -- what is there ----------------------------------------------------------------------------

    def _snapshots(
        self, namespace: bytes, labels: Sequence[Label], known: Match
    ) -> Sequence[Snapshot]:
        """Return possible cuts with the cells that they need, the longest first.

        These are the longest ones, and the longest within what each faster tier has.
        """
        matched: dict[int, Match | None] = {}
        found: dict[int, Snapshot] = {}
        grain = self._shape.grain_blocks
        for _, run in list(runs_of(known.tiers))[-MAX_COMPARED:]:
            ends = range(run.stop // grain * grain, 0, -grain)
            cuts = (
                snapshot
                for at in ends[:MAX_SEARCHED]
                if (snapshot := self._snapshot(namespace, known.blocks, at, matched)) is not None
            )
            found.update((each.num_blocks, each) for each in islice(cuts, MAX_COMPARED))
        return [found[at] for at in sorted(found, reverse=True)]

    def _state_at(self, lease: Lease, num_blocks: int) -> Snapshot | None:
        return self._snapshot(lease.namespace, lease.blocks, num_blocks, {})

    def _snapshot(
        self,
        namespace: bytes,
        path: Sequence[BlockId],
        cut: int,
        matched: dict[int, Match | None],
    ) -> Snapshot | None:
        """Return the cells that a cut needs; None if one is missing.

        matched: cells by the number of blocks before them; filled here.
        """
        cells = []
        for at in self._shape.ends_in_reach(cut):
            if at not in matched:
                one = self._match_path(namespace, self._cell(self._index.key(path[at - 1])))
                matched[at] = one if one.num_blocks == self._size else None
            cell = matched[at]
            if cell is None:
                return None
            cells.append(cell)
        return Snapshot(cut, joined(cells[::-1]))

    def lookup(self, namespace: bytes, labels: Sequence[Label]) -> bool:
        """Look up a prompt's blocks in storage, and the cells of its longest possible cut."""
        waits = super().lookup(namespace, labels)
        if not self._ladder.unindexed():
            return waits
        known = self._match_path(namespace, labels)
        grain = self._shape.grain_blocks
        ends = range(known.num_blocks // grain * grain, 0, -grain)
        num_there = 0
        for at in ends[: self._shape.num_cells + MAX_LOOKED_UP]:
            cell = self._cell(self._index.key(known.blocks[at - 1]))
            is_asked = begin_lookup(self._ladder, self._index, namespace, cell)
            waits |= is_asked
            is_there = is_asked or self._match_path(namespace, cell).num_blocks == self._size
            num_there = num_there + 1 if is_there else 0
            if num_there > self._shape.num_cells:  # one more, for a prompt that is repeated
                break
        return waits

    # -- the life of a request --------------------------------------------------------------------

    def lease(self, namespace: bytes, labels: Sequence[Label], match: Match) -> Lease:
        assert isinstance(match, SnapshotMatch), "of this cache"
        lease = WindowLease(
            self._index,
            namespace,
            labels[:],
            match,
            self._clock(),
            self._cell_slots,
            self._end_start,
        )
        self._leases.add(lease)
        return lease

    def transfer(self, lease: Lease, plan: Plan, num_blocks: int) -> bool:
        assert isinstance(lease, WindowLease), "of this cache"
        cut = plan.num_reused_blocks
        ring_blocks = self._shape.ring_blocks(num_blocks)
        num_new = num_blocks - cut + plan.num_copied_blocks + ring_blocks
        if num_new > self.num_available_slots:  # nothing is loaded for a request that has to wait
            return False
        ends, cells = range(0), list[list[Label]]()
        num_bytes: int | None = 0
        for snapshot in lease.match.snapshots:
            if snapshot.num_blocks == cut:
                ends = self._shape.ends_in_reach(cut)[::-1]
                cells = [self._cell(self._index.key(lease.blocks[at - 1])) for at in ends]
                labels = [label for cell in cells for label in cell]
                start = self._begin_from(lease, snapshot, labels)
                # First: a prefill that follows the load of the path needs all cells at once.
                num_bytes = self._load(start, snapshot.match)
        if num_bytes is None or not super().transfer(lease, plan, num_blocks + ring_blocks):
            return False
        for at, cell in zip(ends, cells, strict=True):
            self._report_use(lease, at, cell)
        lease.record.load_bytes += num_bytes
        lease.slots, lease.ring = lease.slots[:num_blocks], lease.slots[num_blocks:]
        self._check()
        return True

    def _cell_slots(self) -> Sequence[Slot] | None:
        return self._ladder.allocate(self._size, as_neighbours=False)

    def follow(self, lease: Lease) -> LayerGate | None:
        """Do the same as ``Cache.follow``, once all cells have arrived."""
        assert isinstance(lease, WindowLease), "of this cache"
        if lease.start is not None and not lease.start.ready:
            return None
        return super().follow(lease)

    def commit(self, lease: Lease, num_blocks: int) -> None:
        """Do the same as ``Cache.commit``, and add the cells up to there.

        The engine has written them.
        """
        super().commit(lease, num_blocks)
        assert isinstance(lease, WindowLease), "of this cache"
        if lease.is_private:
            return
        for at in [end for end in lease.cells if end <= len(lease.blocks)]:
            lease.made[at] = self._add(lease, at)
        # One more stays: if the prompt is repeated, a token of it is left to compute.
        passed = num_blocks - (self._shape.num_cells + 1) * self._shape.grain_blocks
        for at in [end for end in lease.made if end <= passed]:
            if self._is_stored(lease.made[at]):
                self._ladder.evict_blocks(lease.made.pop(at), DEVICE)
        self._check()

    def _add(self, lease: WindowLease, at: int) -> Sequence[BlockId]:
        """Add a cell that the engine has written, and return its blocks."""
        labels = self._cell(self._index.key(lease.blocks[at - 1]))
        self._report_use(lease, at, labels)
        state = self._add_state(lease, labels, lease.cells.pop(at))
        blocks = () if state is None else state.blocks
        self._end(state)  # it is stored below
        return blocks

    def _report_use(self, lease: Lease, at: int, cell: Sequence[Label]) -> None:
        """Report to the policies that a request uses or has made a cell."""
        grain, front = self._shape.grain_blocks, lease.blocks[at - 1]
        last = len(lease.labels) // grain * grain
        at_end = at > last - self._shape.num_cells * grain
        self._index.on_state(lease.namespace, cell, 0, front, at_end, self._clock())

    def _is_stored(self, blocks: Sequence[BlockId]) -> bool:
        """Whether the tier below the device has all of ``blocks``."""
        if HOST not in self._tiers:
            return False
        return self._index.states_of(blocks, HOST).count(State.READY) == len(blocks)

    def release(self, lease: Lease, record: bool = True) -> None:
        super().release(lease, record)
        if isinstance(lease, WindowLease):
            lease.ring, lease.cells, lease.made = (), {}, {}

    # -- hints ------------------------------------------------------------------------------------

    def hint(self, namespace: bytes, labels: Sequence[Label], hint: Hint) -> Sequence[HintResult]:
        """Do the same as ``Cache.hint``, and apply what concerns the prompt's end to its cells."""
        results = super().hint(namespace, labels, hint)
        to_the_end = (
            replace(each, first_token=0) for each in hint.retain if each.last_token is None
        )
        of_cells = replace(hint, retain=tuple(to_the_end), prefetch_within_s=None)
        if of_cells.demote_from is not None:
            of_cells = replace(of_cells, demote_from=0)
        for cell in self._last_cells(namespace, labels) if of_cells != Hint() else ():
            super().hint(namespace, cell, of_cells)
        return results

    def wait(self, namespace: bytes, labels: Sequence[Label], is_waiting: bool) -> None:
        super().wait(namespace, labels, is_waiting)
        for cell in self._last_cells(namespace, labels):
            super().wait(namespace, cell, is_waiting)

    def _last_cells(self, namespace: bytes, labels: Sequence[Label]) -> list[list[Label]]:
        """Return the cells in reach of the prompt's last whole chunk."""
        keys = keys_along(namespace, labels, 0, len(labels), namespace)
        grain = self._shape.grain_blocks
        ends = self._shape.ends_in_reach(len(labels) // grain * grain)
        return [self._cell(keys[at - 1]) for at in ends]

    # -- deletion and control ---------------------------------------------------------------------

    def delete(self, namespace: bytes, labels: Sequence[Label]) -> Deletion:
        grain, paths = self._shape.grain_blocks, [labels]
        keys = list(next_keys(namespace, labels))[grain - 1 :: grain]
        paths += map(self._cell, keys)
        return Deletion.joined([Cache.delete(self, namespace, path) for path in paths])

    def stored(self, namespace: bytes, labels: Sequence[Label]) -> tuple[int, bool]:
        """Return how many of a prompt's first blocks are stored with the cells that a cut needs.

        The second value is whether more are on their way.
        """
        num, is_coming = super().stored(namespace, labels)
        path = self._index.extend(namespace, labels[:num])
        are_stored: dict[int, bool] = {}
        grain = self._shape.grain_blocks
        for cut in range(num // grain * grain, 0, -grain):
            ends = self._shape.ends_in_reach(cut)
            for at in [end for end in ends if end not in are_stored]:
                cell = self._cell(self._index.key(path[at - 1]))
                found, comes = super().stored(namespace, cell)
                are_stored[at] = found == self._size
                is_coming |= comes
            if all(are_stored[at] for at in ends):
                return cut, is_coming
        return 0, is_coming


def _cell_label(at: int) -> Label:
    """Return the label of a cell's block; tokens have no such numbers."""
    return b"cell" + at.to_bytes(4, "little")
