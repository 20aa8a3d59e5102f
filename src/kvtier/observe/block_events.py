"""Events of blocks that enter and leave tiers, for routers that send a prompt to its KV.

    the cache's thread            the publisher's thread
    BlockLog  -- appends -->      BlockEvents  -->  BlockStored, BlockRemoved, AllBlocksCleared

The cache's thread appends only what it has at hand: a prompt's labels and blocks, or blocks that
moved. The publisher's thread derives what routers need: each block's hash, tokens and parent. The
hash is

    hash[-1] = BLAKE3(namespace)        hash[i] = BLAKE3(hash[i-1] || label[i])

with eight bytes each, so equal prompts of one model and tenant have equal hashes in every process
and after every restart. A published block is a chunk, and has the hash of its last block.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

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
MAX_SALTS = 1 << 16
"""Namespaces whose salts are remembered."""
MAX_RECENT = 1 << 17
"""Chunks whose tokens are remembered, for events of slower tiers and snapshots: 112 MB at 128
tokens per chunk."""
MAX_AT_ONCE = 256
"""Chunks in one event of a snapshot."""

CLEARED: Event = {"type": "AllBlocksCleared"}
HASH_BYTES = 8
TOKEN_BYTES = 4
PLACE = 0xFFFF_FFFF
"""Mask of a block number's lower half, the row in the index. Rows are reused; the upper half counts
the earlier uses."""
NO_PLACE = -1
"""Stands for the place of a block that is not there."""
MEDIA = {DEVICE: "GPU", HOST: "CPU"}
"""Medium names in the event protocol. The first is the engine's own memory, whatever its device."""


class PromptBlocks(NamedTuple):
    """The blocks of a prompt, with the tier of each. salt: that of the namespace."""

    namespace: bytes
    labels: Sequence[Label]
    blocks: Sequence[BlockId]
    tiers: Sequence[str]
    salt: str = ""

    @property
    def size(self) -> int:
        return len(self.blocks)


class BlocksMoved(NamedTuple):
    """Blocks that were added to a tier or removed from it."""

    tier: str
    blocks: Sequence[BlockId]
    is_removed: bool

    @property
    def size(self) -> int:
        return len(self.blocks)


class SizedChange(Protocol):
    """Change of some blocks. size: their number; more if they need more memory than tokens."""

    @property
    def size(self) -> int: ...


Change = PromptBlocks | BlocksMoved
AnyChange = TypeVar("AnyChange", bound=SizedChange)


class ChangeLog(Generic[AnyChange]):
    """Bounded queue of changes from the cache's thread to the publisher's thread. Neither waits."""

    def __init__(self) -> None:
        self._changes: deque[AnyChange] = deque()
        self._num_put = 0  # written by the cache's thread
        self._num_taken = 0  # written by the publisher's thread
        self._was_lost = False

    def lose(self) -> None:
        """Note that changes were lost: readers have to start again."""
        self._was_lost = True

    def put(self, change: AnyChange) -> None:
        """Append a change."""
        num = change.size
        if not num:
            return
        is_full = self._num_put - self._num_taken + num > MAX_BLOCKS
        if is_full or len(self._changes) >= MAX_CHANGES:
            self._was_lost = True
            return
        self._num_put += num
        self._changes.append(change)

    def take(self) -> tuple[list[AnyChange], bool]:
        """Return the changes since the last call, and whether some were lost."""
        was_lost, self._was_lost = self._was_lost, False
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        self._num_taken += sum(change.size for change in changes)
        return changes, was_lost


class BlockLog(ChangeLog[Change]):
    """Log of a cache that is given tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._salts: OrderedDict[bytes, str] = OrderedDict()  # by namespace

    def name(self, namespace: bytes, salt: str) -> None:
        """Note the salt of a namespace, before prompts of it are appended."""
        self._salts[namespace] = salt
        self._salts.move_to_end(namespace)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)

    def prompt(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        blocks: Sequence[BlockId],
        tiers: Sequence[str],
    ) -> None:
        """Append a prompt's blocks, some of which may be new.

        Those of a namespace whose salt is unknown are not published: a router would take them for
        blocks that every tenant can use.
        """
        salt = self._salts.get(namespace)
        if salt is not None:
            self.put(PromptBlocks(namespace, labels, blocks, tiers, salt))

    def moved(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        """Append blocks that were added to ``tier``, or are removed from it."""
        self.put(BlocksMoved(tier, blocks, is_removed))


class BlockEvents:
    """Turns changes into events: one when a published block enters a tier, one when it leaves.

    A published block is a chunk: what the engine computes at once, and reuses whole. Routers name
    a block by its tokens, so two chunks that only begin alike would be one block to them.

    Chunks that no prompt has contained yet, for example recovered ones, have no events until one
    does. Memory: 26 bytes per block that the cache can hold.

    tiers: of the cache.
    shared: those of them that other processes fill, too.
    block_size: tokens.
    chunk_blocks: blocks that are computed and reused together, counted from a prompt's beginning.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        shared: Sequence[str],
        block_size: int,
        chunk_blocks: int = 1,
    ) -> None:
        self._bits = {tier: np.uint8(1 << at) for at, tier in enumerate(tiers)}
        self._media = {tier: medium_of(tier, tier in shared) for tier in tiers}
        self._block_bytes = block_size * TOKEN_BYTES
        self._chunk_blocks = chunk_blocks
        self._chunk_tokens = block_size * chunk_blocks
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        # Indexed by place.
        self._blocks = np.zeros(0, np.int64)  # the block at this place
        self._parents = np.zeros(0, np.uint32)  # the parent's place + 1
        self._where = np.zeros(0, np.uint8)  # bit set of the tiers that have it
        self._chunks = np.zeros(0, np.uint32)  # the place of its chunk's last block + 1; 0: unknown
        # Indexed by the place of a chunk's last block.
        self._hashes = np.zeros(0, np.uint64)  # 0: in no prompt yet
        self._published = np.zeros(0, np.uint8)  # bit set of the tiers that readers know
        self._recent: OrderedDict[int, tuple[bytes, str]] = OrderedDict()  # tokens, salt

    def of(self, changes: Sequence[Change]) -> Iterator[Event]:
        """Yield the events of some changes."""
        for change in _joined(changes):
            places = self._places(change.blocks)
            if isinstance(change, PromptBlocks):
                yield from self._of_prompt(change, places)
            else:
                yield from self._moved(change, places)

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
            for column in (self._where, self._chunks, self._hashes, self._published):
                column[new] = 0
        return places

    def _grow(self, size: int) -> None:
        size = max(size, 2 * len(self._blocks), 1024)
        self._blocks = _grown(self._blocks, size, NO_PLACE)
        self._parents = _grown(self._parents, size)
        self._where = _grown(self._where, size)
        self._chunks = _grown(self._chunks, size)
        self._hashes = _grown(self._hashes, size)
        self._published = _grown(self._published, size)

    def _of_prompt(self, prompt: PromptBlocks, places: Array) -> Iterator[Event]:
        for tier, run in runs_of(prompt.tiers[: len(places)]):
            self._where[places[run.start : run.stop]] |= self._bits[tier]
        size = self._chunk_blocks
        chunks = places[size - 1 :: size]
        is_named = self._hashes[chunks] != 0
        if not is_named.all():
            self._name(prompt, places[: size * len(chunks)], int(is_named.argmin()))
        for tier in self._bits:
            yield from self._changed(tier, chunks, prompt)
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def _name(self, prompt: PromptBlocks, places: Array, first: int) -> None:
        """Hash the chunks of a prompt from ``first`` on. places: of the blocks of whole chunks."""
        size = self._chunk_blocks
        start = first * size
        before = _hash(prompt.namespace)
        if first:
            before = int(self._hashes[places[start - 1]]).to_bytes(HASH_BYTES, "little")
        hashes = []
        for label in prompt.labels[start : len(places)]:
            before = _hash(before + label)
            hashes.append(before)
        new, chunks = places[start:], places[start + size - 1 :: size]
        self._hashes[chunks] = np.frombuffer(b"".join(hashes[size - 1 :: size]), "<u8")
        self._parents[new[0]] = places[start - 1] + 1 if first else 0
        self._parents[new[1:]] = new[:-1] + 1
        self._chunks[new] = np.repeat(chunks + 1, size)
        for at, chunk in enumerate(chunks.tolist(), start=first):
            self._recent[chunk] = self._tokens(prompt.labels, at), prompt.salt

    def _tokens(self, labels: Sequence[Label], at: int) -> bytes:
        """Return the tokens of one chunk of a prompt."""
        first = at * self._chunk_blocks
        some = labels[first : first + self._chunk_blocks]
        return b"".join(label[: self._block_bytes] for label in some)

    def _moved(self, change: BlocksMoved, places: Array) -> Iterator[Event]:
        bit = self._bits[change.tier]
        if change.is_removed:
            self._where[places] &= ~bit
        else:
            self._where[places] |= bit
        ends = self._chunks[places]
        chunks = np.array(list(dict.fromkeys(ends[ends != 0].tolist())), np.int64) - 1
        # Without a hash: the last block has left the cache, and its place is another block's.
        yield from self._changed(change.tier, chunks[self._hashes[chunks] != 0])

    def _changed(
        self, tier: str, chunks: Array, prompt: PromptBlocks | None = None
    ) -> Iterator[Event]:
        """Compare chunks of a tier with what was published, and yield an event for each difference.

        A chunk is in a tier if all of its blocks are.

        prompt: the prompt that begins with these chunks, if there is one.
        """
        bit = self._bits[tier]
        is_whole, member = np.ones(len(chunks), bool), chunks
        for _ in range(self._chunk_blocks):
            is_whole &= (self._where[member] & bit) != 0
            member = self._above(member)
        is_published = (self._published[chunks] & bit) != 0
        if np.array_equal(is_whole, is_published):
            return  # as for most prompts: repeated ones
        gone = chunks[is_published & ~is_whole]
        self._published[gone] &= ~bit
        if len(gone):
            hashes = self._hashes[gone].tolist()
            yield {"type": "BlockRemoved", "block_hashes": hashes, **self._media[tier]}
        positions = np.flatnonzero(is_whole & ~is_published)
        come = chunks[positions]
        self._published[come] |= bit
        if prompt is not None:
            for chunk, at in zip(come.tolist(), positions.tolist(), strict=True):
                if chunk not in self._recent:
                    self._recent[chunk] = self._tokens(prompt.labels, at), prompt.salt
        yield from self._stored(tier, come)

    def _above(self, places: Array) -> Array:
        """Return the places of some blocks' parents; -1 for none."""
        above: Array = self._parents[places].astype(np.int64) - 1
        return above

    def _chunks_above(self, chunks: Array) -> Array:
        """Return the chunks before some chunks; -1 for none."""
        for _ in range(self._chunk_blocks):
            chunks = self._above(chunks)
        return chunks

    def snapshot(self) -> Iterator[Event]:
        """Yield events that bring a new reader to the present state.

        A chunk is left out if its tokens, or those of a chunk before it in the prompt, are
        forgotten. Cost: O(remembered chunks).
        """
        known = [chunk for chunk in self._recent if self._published[chunk]]
        chunks = self._from_the_roots(np.array(known, np.int64))
        for where, run in runs_of(self._published[chunks].tolist()):
            for tier, bit in self._bits.items():
                if where & bit:
                    for first in range(run.start, run.stop, MAX_AT_ONCE):
                        last = min(first + MAX_AT_ONCE, run.stop)
                        yield from self._stored(tier, chunks[first:last])

    def _from_the_roots(self, chunks: Array) -> Array:
        """Return chunks in an order in which each follows its parent.

        A chunk whose parent is not among them is left out: a reader could not place it.
        """
        behind: dict[int, list[int]] = {}
        for chunk, before in zip(chunks.tolist(), self._chunks_above(chunks).tolist(), strict=True):
            behind.setdefault(before, []).append(chunk)
        ordered, ready = [], behind.get(NO_PLACE, [])
        while ready:
            ordered.append(ready.pop())
            ready += behind.get(ordered[-1], ())
        return np.array(ordered, np.int64)

    # -- events of chunks that entered a tier -----------------------------------------------------

    def _stored(self, tier: str, chunks: Array) -> Iterator[Event]:
        """Yield an event for each run of consecutive chunks of a prompt.

        Chunks whose tokens are forgotten have one event without tokens. A reader that does not know
        their hashes ignores it.
        """
        found = [self._recent.get(chunk) for chunk in chunks.tolist()]
        is_found = np.array([known is not None for known in found], bool)
        named = [known for known in found if known is not None]
        recent, others = chunks[is_found], chunks[~is_found]
        above = self._chunks_above(recent)
        edges = np.flatnonzero(above[1:] != recent[:-1]) + 1
        for first, end in pairwise([0, *edges.tolist(), len(recent)]):
            if first < end:
                tokens, salts = zip(*named[first:end], strict=True)
                hashes = self._hashes[recent[first:end]].tolist()
                before = int(above[first])
                parent = int(self._hashes[before]) if before >= 0 else None
                yield self._event(tier, hashes, tokens, parent, salts[0])
        if len(others):
            yield self._event(tier, self._hashes[others].tolist())

    def _event(
        self,
        tier: str,
        hashes: list[int],
        tokens: Sequence[bytes] = (),
        parent: int | None = None,
        salt: str = "",
    ) -> Event:
        """Return the event of consecutive chunks.

        salt: of the prompt. Readers that compute hashes of their own need it: Dynamo and SGLang
        read ``cache_salt``, llm-d reads ``extra_keys`` of a prompt's first block, as vLLM has it.
        """
        is_first = bool(tokens) and parent is None
        return {
            **stored(hashes, parent, _ids(tokens), self._chunk_tokens if tokens else 0, salt),
            "extra_keys": [[salt], *[None] * (len(hashes) - 1)] if salt and is_first else None,
            **self._media[tier],
        }


def stored(
    hashes: Sequence[object],
    parent: object,
    token_ids: Sequence[int],
    block_size: int,
    salt: str | None,
) -> dict[str, object]:
    """Return the event of blocks one behind the other, without their medium."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "lora_name": None,
        "cache_salt": salt or None,
    }


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


def medium_of(tier: str, is_shared: bool) -> dict[str, str]:
    """Return the medium as vLLM's readers know it.

    ``ownership`` is left out: Dynamo drops every event with a value that it does not know.
    """
    if tier in MEDIA:
        return {"medium": MEDIA[tier], "locality": "LOCAL"}
    where = "REMOTE" if is_shared or tier != DISK else "LOCAL"
    return {"medium": "STORAGE", "locality": where}
