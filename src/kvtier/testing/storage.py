"""In-memory storage tier with gates and faults, for tests of the layers above it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Lock

from kvtier.core.types import BlockKey, BlockName
from kvtier.devices import Finding
from kvtier.layout import KVGroup
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, ScrubReport, StorageFacts, StorageTier


class StoredBlocks:
    """Content that outlives a ``MemoryStorage``: bytes of blocks by key, oldest first.

    spoiled: keys of damaged blocks.
    """

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}
        self.spoiled: set[BlockKey] = set()

    def copy(self) -> StoredBlocks:
        """Return a copy of the blocks, as a crash would leave them now."""
        copied = StoredBlocks()
        copied.blocks.update(self.blocks)
        return copied


class MemoryStorage(StorageTier):
    """Storage tier of ``num_blocks`` blocks in memory. A later tier over the same shelf finds them.

    Attributes:
        open_finds, open_reads, open_writes: gates, initially open. While one is cleared, its calls
            wait until they time out.
        spoiled: keys that are returned as ``DAMAGED``, until they are put again.
        refused: keys that can't be put.
        unreachable: whether every get and put fails.
        num_written: number of written blocks.
        reads: keys of each get that has begun.
        is_reading, is_writing, was_asked: events that are set by the first get, put and find.
        scrubs: ``max_bytes`` of each scrub.
    """

    def __init__(
        self,
        group: KVGroup,
        num_blocks: int,
        shelf: StoredBlocks,
        name: str = "disk",
        facts: StorageFacts | None = None,
    ) -> None:
        self.name = name
        self.bytes_per_block = group.bytes_per_block
        self.facts = facts or StorageFacts(finds_at_once=True, wants_scrubbing=True)
        self.open_finds, self.open_reads, self.open_writes = Event(), Event(), Event()
        self.is_reading, self.is_writing, self.was_asked = Event(), Event(), Event()
        for gate in (self.open_finds, self.open_reads, self.open_writes):
            gate.set()
        self.spoiled = shelf.spoiled
        self.refused: set[BlockKey] = set()
        self.unreachable = False
        self.num_written = 0
        self.reads: list[list[BlockKey]] = []
        self.scrubs: list[int] = []
        self.closed = False
        self._shelf = shelf
        self._room = num_blocks
        self._lock = Lock()
        for key in list(shelf.blocks)[num_blocks:]:
            del shelf.blocks[key]
        self._unindexed = dict.fromkeys(shelf.blocks)
        self._known: set[BlockKey] = set()

    @property
    def num_blocks(self) -> int:
        return self._room

    @property
    def num_used(self) -> int:
        """Number of blocks that were put or found, and not dropped."""
        return len(self._known)

    @property
    def num_unindexed(self) -> int:
        """Number of blocks of an earlier tier that were not found yet."""
        return len(self._unindexed)

    @property
    def has_unindexed(self) -> bool:
        return bool(self._unindexed)

    def unindexed_keys(self) -> list[BlockKey]:
        return list(self._unindexed)

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        outcomes = []
        self.was_asked.set()
        if not self.open_finds.wait(timeout_s):
            return [Outcome.FAILED] * len(keys)
        with self._lock:
            for key in keys:
                if key in self._unindexed:
                    del self._unindexed[key]
                    self._known.add(key)
                outcomes.append(Outcome.THERE if key in self._known else Outcome.ABSENT)
        return outcomes

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        self.is_writing.set()
        if not self.open_writes.wait(timeout_s):
            return [Outcome.FAILED] * len(names)
        return [self._put(name.key, blocks.read(at)) for at, name in enumerate(names)]

    def _put(self, key: BlockKey, content: bytes) -> Outcome:
        if key in self.refused or self.unreachable:
            return Outcome.FAILED
        with self._lock:
            self._unindexed.pop(key, None)
            if key not in self._known and len(self._known) >= self._room:
                return Outcome.FAILED
            if key not in self._shelf.blocks and len(self._shelf.blocks) >= self._room:
                oldest = next(block for block in self._shelf.blocks if block not in self._known)
                self._unindexed.pop(oldest, None)
                del self._shelf.blocks[oldest]
            self._known.add(key)
            self._shelf.blocks[key] = content
            self.spoiled.discard(key)
            self.num_written += 1
        return Outcome.THERE

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        self.reads.append(list(keys))
        self.is_reading.set()
        if not self.open_reads.wait(timeout_s):
            return [Outcome.FAILED] * len(keys)
        return [self._get(key, blocks, at) for at, key in enumerate(keys)]

    def _get(self, key: BlockKey, blocks: Pieces, at: int) -> Outcome:
        if self.unreachable:
            return Outcome.FAILED
        content = self._shelf.blocks.get(key)
        if content is None or key not in self._known:
            return Outcome.ABSENT
        if key in self.spoiled:
            with self._lock:
                self._known.discard(key)
            return Outcome.DAMAGED
        blocks.write(at, content)
        return Outcome.THERE

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        with self._lock:
            self._known.difference_update(keys)
            for key in keys if for_good else ():
                self._unindexed.pop(key, None)
                self._shelf.blocks.pop(key, None)

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify every block."""
        self.scrubs.append(max_bytes)
        num = len(self._shelf.blocks)
        damaged = [key for key in self._shelf.blocks if key in self.spoiled]
        with self._lock:
            self._known.difference_update(damaged)
            for key in damaged:
                self._unindexed.pop(key, None)
        return ScrubReport(num, num * self.bytes_per_block, len(damaged))

    def findings(self) -> list[Finding]:
        return [Finding(f"{self.name} tier", f"{self._room} blocks in a dictionary")]

    def close(self) -> None:
        """Close the tier; its content stays."""
        self.closed = True
