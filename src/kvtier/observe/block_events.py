"""Events of blocks that enter and leave tiers, for routers that send a prompt to its KV.

    the cache's thread            the publisher's thread
    BlockLog  -- appends -->      BlockEvents  -->  BlockStored, BlockRemoved, AllBlocksCleared

The cache's thread appends only what it has at hand: a prompt's labels and blocks, or blocks that
moved. The publisher's thread derives what routers need: each block's hash, tokens and parent. The
hash is

    hash[-1] = BLAKE3(namespace)        hash[i] = BLAKE3(hash[i-1] || label[i])

with eight bytes each, so equal prompts of one model and tenant have equal hashes in every process
and after every restart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.grouping import runs_of
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Label

Event = Mapping[str, object]
"""An event as it is sent: a field "type", then the fields of that type."""
Array = npt.NDArray[np.int64]
T = TypeVar("T", bound=np.generic)

MAX_BLOCKS = 1 << 18
"""Maximum number of blocks in changes that wait for the publisher. They hold the tokens of their
prompts: 64 MiB at 64 tokens per block. Beyond it, changes are lost and all subscribers have to
start again."""
MAX_CHANGES = 1 << 16
MAX_RECENT = 1 << 16
"""Blocks whose tokens are remembered, so that an event for a slower tier soon afterwards has them,
too: 25 MB at 64 tokens per block."""

CLEARED: Event = {"type": "AllBlocksCleared"}
HASH_BYTES = 8
TOKEN_BYTES = 4
PLACE = 0xFFFF_FFFF
"""Mask of a block number's lower half, the row in the index. Rows are reused; the upper half counts
the earlier uses."""
NOBODY = -1
"""Marks a place without a block."""

MEDIA = {DEVICE: "GPU", HOST: "CPU"}
"""Medium names in the event protocol. The first is the engine's own memory, whatever its device."""


class PromptBlocks(NamedTuple):
    """The blocks of a prompt, with the tier of each."""

    namespace: bytes
    labels: Sequence[Label]
    blocks: Sequence[BlockId]
    tiers: Sequence[str]


class BlocksMoved(NamedTuple):
    """Blocks that were added to a tier or removed from it."""

    tier: str
    blocks: Sequence[BlockId]
    is_removed: bool


Change = PromptBlocks | BlocksMoved


class BlockLog:
    """Bounded queue of changes from the cache's thread to the publisher's thread. Neither waits."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque()
        self._num_put = 0  # written by the cache's thread
        self._num_taken = 0  # written by the publisher's thread
        self._was_lost = False

    def prompt(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        blocks: Sequence[BlockId],
        tiers: Sequence[str],
    ) -> None:
        """Append a prompt's blocks, some of which may be new."""
        self._put(PromptBlocks(namespace, labels, blocks, tiers))

    def moved(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        """Append blocks that were added to ``tier``, or are removed from it."""
        self._put(BlocksMoved(tier, blocks, is_removed))

    def lose(self) -> None:
        """Note that changes were lost: readers have to start again."""
        self._was_lost = True

    def _put(self, change: Change) -> None:
        num = len(change.blocks)
        if not num:
            return
        is_full = self._num_put - self._num_taken + num > MAX_BLOCKS
        if is_full or len(self._changes) >= MAX_CHANGES:
            self._was_lost = True
            return
        self._num_put += num
        self._changes.append(change)

    def take(self) -> tuple[list[Change], bool]:
        """Return the changes since the last call, and whether some were lost."""
        was_lost, self._was_lost = self._was_lost, False
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        self._num_taken += sum(len(change.blocks) for change in changes)
        return changes, was_lost


class BlockEvents:
    """Turns changes into events: one when a block enters a tier, one when it leaves.

    Blocks that no prompt has contained yet, for example recovered ones, have no events until one
    does. Memory: 21 bytes per block that the cache can hold.

    tiers: of the cache.
    shared: those of them that other processes fill, too.
    block_size: tokens.
    """

    def __init__(self, tiers: Sequence[str], shared: Sequence[str], block_size: int) -> None:
        self._bits = {tier: np.uint8(1 << at) for at, tier in enumerate(tiers)}
        self._media = {tier: _medium(tier, tier in shared) for tier in tiers}
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        # Indexed by place.
        self._blocks = np.zeros(0, np.int64)  # the block at this place
        self._hashes = np.zeros(0, np.uint64)  # 0: in no prompt yet
        self._parents = np.zeros(0, np.uint32)  # the parent's place + 1
        self._where = np.zeros(0, np.uint8)  # bit set of the tiers that have it
        self._recent: OrderedDict[int, bytes] = OrderedDict()  # tokens

    def of(self, changes: Sequence[Change]) -> Iterator[Event]:
        """Yield the events of some changes."""
        for change in _joined(changes):
            places = self._places(change.blocks)
            if isinstance(change, PromptBlocks):
                yield from self._of_prompt(change, places)
            elif change.is_removed:
                yield from self._removed(change.tier, places)
            else:
                yield from self._came(change.tier, places)

    def _places(self, blocks: Sequence[BlockId]) -> Array:
        """Return the places of blocks; places with an earlier block are reset."""
        numbers = np.asarray(blocks, np.int64)
        places = numbers & PLACE
        try:
            is_new = self._blocks[places] != numbers
        except IndexError:
            self._grow(int(places.max()) + 1)
            is_new = self._blocks[places] != numbers
        if is_new.any():
            new = places[is_new]
            self._blocks[new] = numbers[is_new]
            self._hashes[new] = 0
            self._where[new] = 0
        return places

    def _grow(self, size: int) -> None:
        size = max(size, 2 * len(self._blocks), 1024)
        self._blocks = _grown(self._blocks, size, NOBODY)
        self._hashes = _grown(self._hashes, size)
        self._parents = _grown(self._parents, size)
        self._where = _grown(self._where, size)

    # -- a prompt ---------------------------------------------------------------------------------

    def _of_prompt(self, prompt: PromptBlocks, places: Array) -> Iterator[Event]:
        is_named = self._hashes[places] != 0
        untold = np.where(is_named, 0, self._where[places])
        for tier, run in runs_of(prompt.tiers[: len(places)]):
            bit, part = self._bits[tier], slice(run.start, run.stop)
            untold[part] |= ~self._where[places[part]] & bit
            self._where[places[part]] |= bit
        if not untold.any():
            return  # as for most prompts: repeated ones
        labels = list(prompt.labels[: len(places)])
        tokens = [label[: self._block_bytes] for label in labels]
        if not is_named.all():
            self._name(prompt.namespace, labels, tokens, places, int(is_named.argmin()))
        for tier, bit in self._bits.items():
            for wanted, run in runs_of(((untold & bit) != 0).tolist()):
                if wanted:
                    some = slice(run.start, run.stop)
                    yield self._stored(tier, places[some], tokens[some])

    def _name(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tokens: Sequence[bytes],
        places: Array,
        first: int,
    ) -> None:
        """Hash the blocks of a prompt from ``first`` on."""
        before = _hash(namespace)
        if first:
            before = int(self._hashes[places[first - 1]]).to_bytes(HASH_BYTES, "little")
        hashes = []
        for label in labels[first:]:
            before = _hash(before + label)
            hashes.append(before)
        new = places[first:]
        self._hashes[new] = np.frombuffer(b"".join(hashes), "<u8")
        self._parents[new[0]] = places[first - 1] + 1 if first else 0
        self._parents[new[1:]] = new[:-1] + 1
        self._recent.update(zip(new.tolist(), tokens[first:], strict=True))
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def _stored(self, tier: str, places: Array, tokens: Sequence[bytes]) -> Event:
        """Return the event of consecutive blocks.

        tokens: of each block. If they are not remembered, the event has none; readers that do not
        know the hash ignore it.
        """
        above = int(self._parents[places[0]]) if tokens else 0
        return {
            "type": "BlockStored",
            "block_hashes": self._hashes[places].tolist(),
            "parent_block_hash": int(self._hashes[above - 1]) if above else None,
            "token_ids": _ids(tokens),
            "block_size": self._block_size if tokens else 0,
            "lora_id": None,
            "lora_name": None,
            **self._media[tier],
        }

    # -- blocks that move -------------------------------------------------------------------------

    def _came(self, tier: str, places: Array) -> Iterator[Event]:
        bit = self._bits[tier]
        is_told = (self._hashes[places] != 0) & (self._where[places] & bit == 0)
        self._where[places] |= bit
        places = places[is_told]
        found = [self._recent.get(place) for place in places.tolist()]
        is_recent = np.array([tokens is not None for tokens in found], bool)
        tokens = [each for each in found if each is not None]
        recent, others = places[is_recent], places[~is_recent]
        edges = np.flatnonzero(self._parents[recent[1:]] != recent[:-1] + 1) + 1
        for first, end in pairwise([0, *edges.tolist(), len(recent)]):
            if first < end:
                yield self._stored(tier, recent[first:end], tokens[first:end])
        if len(others):
            yield self._stored(tier, others, ())

    def _removed(self, tier: str, places: Array) -> Iterator[Event]:
        bit = self._bits[tier]
        is_told = (self._hashes[places] != 0) & (self._where[places] & bit != 0)
        self._where[places] &= ~bit
        hashes = self._hashes[places[is_told]].tolist()
        if hashes:
            yield {"type": "BlockRemoved", "block_hashes": hashes, **self._media[tier]}


def _joined(changes: Sequence[Change]) -> Iterator[Change]:
    """Merge consecutive removals from a tier: a full tier evicts one or two blocks at a time."""

    def leaves(change: Change) -> str:
        return change.tier if isinstance(change, BlocksMoved) and change.is_removed else ""

    for tier, some in groupby(changes, leaves):
        if tier:
            yield BlocksMoved(tier, [block for change in some for block in change.blocks], True)
        else:
            yield from some


def _grown(array: npt.NDArray[T], size: int, empty: int = 0) -> npt.NDArray[T]:
    grown = np.full(size, empty, array.dtype)
    grown[: len(array)] = array
    return grown


def _hash(content: bytes) -> bytes:
    return blake3(content).digest(HASH_BYTES)


def _ids(tokens: Sequence[bytes]) -> list[int]:
    found: list[int] = np.frombuffer(b"".join(tokens), "<u4").tolist()
    return found


def _medium(tier: str, is_shared: bool) -> dict[str, str]:
    """Return the medium as vLLM's readers know it; ``ownership`` names the storage tier."""
    if tier in MEDIA:
        return {"medium": MEDIA[tier], "locality": "LOCAL"}
    where = "REMOTE" if is_shared or tier != DISK else "LOCAL"
    return {"medium": "STORAGE", "locality": where, "ownership": tier}
