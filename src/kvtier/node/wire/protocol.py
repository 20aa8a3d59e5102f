"""Messages between a node and its engines, and their framing on a Unix socket.

An engine sends requests, which are answered by ``id``, and notices, which are not answered. The
node's memory is passed as file descriptors with ``AttachAnswer`` and ``OpenAnswer``; no KV crosses
the socket. A frame is its length (4 bytes, little endian) and one message in MessagePack. Fields
are only added at the end of a message, with a default, so that a peer of the version before ignores
them.

No message occupies the node for long, whatever it contains: the goal is 20 ms of its event loop.
Lengths are bounded by the types of the fields. The line *Work* of a message is the most that its
handling costs. *In turns* means ``MAX_AT_ONCE`` keys or slots at a time: between two turns the
node serves other connections, and after the last one the next message of this one.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from kvtier.core.errors import CacheError
from kvtier.core.hints import MAX_RANGES
from kvtier.core.keys import PackedKeys
from kvtier.index.selection import Int64s

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 16 << 20
MAX_FIRST_BYTES: Final = 64 << 10
"""Longest frame of a process that has not attached yet."""
MAX_KEYS: Final = 1 << 16
"""Most keys of one message."""
MAX_KEY_BYTES: Final = 120
"""Longest key. ``MAX_KEYS`` of them, twice, fit into one frame."""
MAX_STATEMENTS: Final = 2 * MAX_RANGES
"""Most statements of one message. A ``kvtier.core.hints.Hint`` has at most ``MAX_RANGES`` + 2."""
MAX_EXTRA_BYTES: Final = 1 << 10
"""Most bytes of extra keys per hash of a ``DescribeNotice``."""
MAX_MEASURED: Final = 256
"""Most measurements of a ``CostsNotice``."""
MAX_AT_ONCE: Final = 1 << 11
"""Keys or slots that a message which changes blocks handles in one turn."""
RECEIVED_AT_ONCE: Final = 64 << 10
MAX_KEPT_BYTES: Final = 1 << 20
"""Memory for longer frames is given back."""
SOCKET_BYTES: Final = 1 << 20
"""Memory of a socket for what its peer has not read, as far as the system grants it. A long prompt
fits, so that sending it waits for nobody."""
FRAME_HEADER: Final = struct.Struct("<I")
MAX_FDS: Final = 2
FD_BYTES: Final = 4


Keys: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * MAX_KEY_BYTES)]
"""Concatenated keys of blocks."""
OneKey: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
Slots: TypeAlias = bytes
"""Slots as ``pack`` has them, as many as fit into a frame: an engine may release those of many
look-ups at once. Reading the most takes 10 ms."""


class ProtocolError(CacheError):
    """A peer sent something that this version does not understand."""


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base class of all messages."""


class PartitionRequest(Message):
    """Base class of requests about a partition that was opened.

    id: number of the request, which the client's connection sets. partition: its number.
    """

    id: int
    partition: int


class PartitionNotice(Message):
    """Base class of notices about a partition that was opened."""

    partition: int


# -- requests of an engine -------------------------------------------------------------------------


class AttachRequest(Message):
    """First message of a connection.

    Attributes:
        version: of the protocol.
        engine: name of the engine, the same in all of its processes.
        tenant: whose quota counts; engines of different tenants never share a block.
        client: name of the client, the same for all connections of one ``NodeClient``.
        title: name of the engine for display, with model and port; need not be unique.

    Work: one small file.
    """

    id: int
    version: int
    engine: str
    tenant: str = ""
    oldest_version: int = VERSION
    client: str = ""
    title: str = ""


class OpenRequest(Message):
    """Open the cache of one namespace and block size.

    scope: digest of the namespace of all keys; the same bytes for keys that contain it already.
    block_bytes: bytes of a whole block. key_bytes: length of each key. group_bytes: bytes at the
    end of a key that name its KV group; see ``KeyIndex``.

    Work: one slab and one connection per store, opened by a thread; ``MAX_PARTITIONS`` of them.
    """

    id: int
    scope: bytes
    block_bytes: int
    key_bytes: int
    group_bytes: int = 0


class LookupRequest(PartitionRequest):
    """Find a prompt's blocks, in its order. Blocks in memory are leased until ``ReleaseNotice``.

    Attributes:
        keys: concatenated.
        has_gaps: whether blocks behind a missing one may be of use.
        counts: whether the node's metrics count it.

    Work: one look-up per key, in the index and in the disk's; threads query the stores.
    """

    keys: Keys
    has_gaps: bool = False
    counts: bool = True


class FetchRequest(PartitionRequest):
    """Find a prompt's blocks, read those in storage, and lease all that are in memory then.

    Work: as of a ``LookupRequest`` and a ``PromoteRequest``.
    """

    keys: Keys
    timeout_s: float


class ReserveRequest(PartitionRequest):
    """Reserve slots for those of the blocks that are new.

    Work: one eviction per key, in turns.
    """

    keys: Keys


class PromoteRequest(PartitionRequest):
    """Begin to read blocks from storage. beside: blocks that must not be evicted for them.

    Work: one eviction per key, in turns; in each of them one look-up per key of ``beside``.
    """

    keys: Keys
    beside: Keys = b""


class FindRequest(PartitionRequest):
    """Report which blocks exist, after waiting for stores at most ``timeout_s``.

    Work: as of a ``LookupRequest``.
    """

    keys: Keys
    timeout_s: float


class DeleteRequest(PartitionRequest):
    """Delete blocks from every tier; answered once no tier will return them.

    Work: one deletion per key, in turns.
    """

    keys: Keys


# -- notices of an engine --------------------------------------------------------------------------


class CommitNotice(PartitionNotice):
    """Reserved slots have been written. depths: int64, position of each block in its prompt.

    Work: one queued write per slot and storage tier, in turns.
    """

    slots: Slots
    depths: Slots
    to_storage: bool = True


class AbortNotice(PartitionNotice):
    """Reserved slots have not been written, and nothing writes to them any more.

    Work: one free slot per slot, in turns.
    """

    slots: Slots


class ReleaseNotice(PartitionNotice):
    """Leased slots are no longer read. A slot that was leased twice is named twice.

    Work: the end of one lease per slot.
    """

    slots: Slots


class DistrustNotice(PartitionNotice):
    """Leased or reserved slots have wrong contents.

    Work: one eviction per slot, in turns.
    """

    slots: Slots


class WatchNotice(PartitionNotice):
    """Request an ``EndedNotice`` once none of the blocks is in flight to memory.

    Work: one look-up per key.
    """

    watch: int
    keys: Keys


class UseNotice(PartitionNotice):
    """Blocks were used, in the order of their prompt.

    Work: one move in an order per key.
    """

    keys: Keys


class PromptNotice(PartitionNotice):
    """A new request, by all blocks of its prompt.

    Work: one use of the policy's history per key.
    """

    keys: Keys


class ContinueNotice(PartitionNotice):
    """Blocks of an answer follow the block ``before``, in order.

    Work: as of a ``PromptNotice``.
    """

    keys: Keys
    before: OneKey


Statement: TypeAlias = tuple[int, int, int, int, float]
"""Fields of ``kvtier.core.hints.BlockHint``; the time is in seconds from now."""


class HintNotice(PartitionNotice):
    """Statements on a prompt's blocks.

    Work: one statement a turn, each with one look-up per key.
    """

    keys: Keys
    said: Annotated[list[Statement], msgspec.Meta(max_length=MAX_STATEMENTS)]


class DescribeNotice(PartitionNotice):
    """Blocks of a prompt, one behind the other, as their engine publishes them to routers.

    It is sent to nodes that ask for it (``AttachAnswer.describes``).

    Attributes:
        keys: of the blocks.
        model: name under which the engine serves its model.
        block_size: tokens that a hash names.
        hash_bytes: length of a hash; those of 8 bytes, little endian, are published as integers.
        hashes: of all blocks, equally many of each.
        parent: the hash before the first one; b"" at the beginning of a prompt.
        tokens: token ids, uint32.
        is_first: the engine begins to describe blocks of this partition.
        group, kind: the blocks' KV group, and its kind in the engine's words.
        salt, lora_id, lora_name: of the prompt.
        extra_keys: msgpack of a list with what each hash covers besides tokens; b"" for nothing.

    Work: one look-up per key; a publisher's thread does the rest.
    """

    keys: Keys
    model: Annotated[str, msgspec.Meta(max_length=256)]
    block_size: int
    hash_bytes: int
    hashes: bytes
    parent: bytes
    tokens: bytes
    is_first: bool = False
    group: int = 0
    kind: str | None = None
    salt: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: bytes = b""

    @property
    def num_text_bytes(self) -> int:
        """Bytes of its texts, about."""
        return sum(map(len, (self.salt or "", self.lora_name or "", self.kind or "")))

    @property
    def num_bytes(self) -> int:
        """Bytes of what it says of its blocks, about."""
        content = self.hashes, self.tokens, self.extra_keys
        return self.num_text_bytes + sum(map(len, content))


_Tier = Annotated[str, msgspec.Meta(max_length=256)]
Measured: TypeAlias = tuple[_Tier, _Tier, int, float, int]
"""Source and destination of copies, their size class, seconds per byte, and number of copies."""


class CostsNotice(PartitionNotice):
    """Measurements of an engine, at most once a second, for nodes that ask for descriptions.

    Attributes:
        copies: seconds of copies.
        prefill: seconds per token, and per pair of tokens; None before any was measured.
        num_prefills: number of measurements behind it.

    Work: one addition per copy.
    """

    copies: Annotated[list[Measured], msgspec.Meta(max_length=MAX_MEASURED)]
    prefill: tuple[float, float] | None = None
    num_prefills: int = 0


class ReportNotice(Message):
    """Calls to the node that failed, since the last report.

    failures: calls without an answer in time. pauses: how often the client's breaker opened.

    Work: two additions.
    """

    failures: int
    pauses: int


class DetachNotice(Message):
    """Last message of a connection. A client that has sent it on its last one uses no slot.

    Work: the end of all leases and reservations of the engine, in turns.
    """


# -- answers of the node ---------------------------------------------------------------------------


class AttachAnswer(Message):
    """Answer to ``AttachRequest``, with the memory's file descriptor.

    instance: name of this memory; a node that starts with new memory has another one. storages:
    names of the storage tiers, fastest first. describes: whether engines are to describe blocks.
    """

    id: int
    version: int
    memory_bytes: int
    segment_bytes: int
    instance: str
    storages: list[str] = msgspec.field(default_factory=list)
    describes: bool = False


class RefusedAnswer(Message):
    """The request can't be served. reason: one sentence."""

    id: int
    reason: str


class OpenAnswer(Message):
    """Answer to ``OpenRequest``, with the file descriptor of its generations.

    num_slots: slots that the whole memory would have at this block size. capacity_bytes: of the
    whole memory and of the partition's storage; 0 from a node that does not report it.
    """

    id: int
    partition: int
    num_slots: int
    capacity_bytes: int = 0


class LookupAnswer(Message):
    """Answer to ``LookupRequest``.

    places: one byte per key, as below. slots, generations: int64, of the blocks in memory, in
    their order. sources: one byte per key, the tier that it would be read from: 0 for memory, then
    the storage tiers. pending: number of the look-ups in storage that are in flight; if there are
    any, an ``EndedNotice`` with the request's number follows.
    """

    id: int
    places: bytes
    slots: bytes
    generations: bytes
    sources: bytes = b""
    pending: int = 0


class FetchAnswer(Message):
    """Answer to ``FetchRequest``, one entry per key.

    slots: int64, -1 for a block that is not there. generations: int64. failed: one byte per key, 1
    if the block may exist and could not be read.
    """

    id: int
    slots: bytes
    generations: bytes
    failed: bytes


class ReserveAnswer(Message):
    """Answer to ``ReserveRequest``. new: one byte per key, 1 if it has a slot to fill.

    known: one byte per key, 1 if memory has the block or another engine is writing it. slots,
    generations: int64, of the new blocks in their order.
    """

    id: int
    new: bytes
    known: bytes
    slots: bytes
    generations: bytes


class PromoteAnswer(Message):
    """Answer to ``PromoteRequest``. num: how many of the first blocks arrive, or are in memory."""

    id: int
    num: int


class OutcomesAnswer(Message):
    """Answer to ``FindRequest`` and ``DeleteRequest``. outcomes: one byte per key, as below."""

    id: int
    outcomes: bytes


class EndedNotice(Message):
    """The blocks of a ``WatchNotice`` are no longer in flight.

    seconds: time since the notice came; 0 from a node that does not measure it.
    """

    watch: int
    seconds: float = 0.0


ABSENT, ARRIVING, MEMORY, STORAGE, UNKNOWN = range(5)
"""Bytes of ``LookupAnswer.places``: the numbers of ``BlockState``."""
MISSING, THERE, FAILED = range(3)
"""Bytes of ``OutcomesAnswer.outcomes``."""

FromEngine: TypeAlias = (
    AttachRequest
    | OpenRequest
    | LookupRequest
    | FetchRequest
    | ReserveRequest
    | PromoteRequest
    | FindRequest
    | DeleteRequest
    | CommitNotice
    | AbortNotice
    | ReleaseNotice
    | DistrustNotice
    | WatchNotice
    | UseNotice
    | PromptNotice
    | ContinueNotice
    | HintNotice
    | DescribeNotice
    | CostsNotice
    | ReportNotice
    | DetachNotice
)
FromNode: TypeAlias = (
    AttachAnswer
    | RefusedAnswer
    | OpenAnswer
    | LookupAnswer
    | FetchAnswer
    | ReserveAnswer
    | PromoteAnswer
    | OutcomesAnswer
    | EndedNotice
)

Request: TypeAlias = AttachRequest | OpenRequest | PartitionRequest
"""Messages that are answered."""

Turns: TypeAlias = Generator[None, None, None]
"""Work of a message, cut into turns."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message. Text that is not UTF-8, and arrays
in thousands of arrays, are reported by errors of Python."""

_encoder = msgspec.msgpack.Encoder()
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def frame(message: Message) -> bytearray:
    """Return a message as one frame."""
    content = bytearray()
    _encoder.encode_into(message, content, FRAME_HEADER.size)
    FRAME_HEADER.pack_into(content, 0, len(content) - FRAME_HEADER.size)
    return content


def decode_engine(content: bytes | bytearray | memoryview) -> FromEngine:
    """Decode the content of a frame of an engine. Raises ``ProtocolError``."""
    try:
        return _from_engine.decode(content)
    except UNREADABLE as error:
        raise ProtocolError(f"an engine sent an unknown message: {error}") from None


def decode_node(content: bytes | bytearray | memoryview) -> FromNode:
    """Decode the content of a frame of a node. Raises ``ProtocolError``."""
    try:
        return _from_node.decode(content)
    except UNREADABLE as error:
        raise ProtocolError(f"the node sent an unknown message: {error}") from None


class Frames:
    """Splits a byte stream into the contents of its frames.

    The stream is received into memory of this object, which grows to the longest frame.

    most_bytes: longest content that is accepted.
    """

    def __init__(self, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self.most_bytes = most_bytes
        self._memory = memoryview(bytearray(RECEIVED_AT_ONCE))
        self._first = self._end = 0  # of what was received and not taken

    def memory(self) -> memoryview:
        """Return memory to receive into. Frames that were taken are not valid any more."""
        before, num = self._memory, self._end - self._first
        if not num and len(before) <= MAX_KEPT_BYTES:  # as it usually is
            self._first = self._end = 0
            return before
        size = max(RECEIVED_AT_ONCE, self._next_bytes())
        if not size <= len(before) <= max(size, MAX_KEPT_BYTES):
            self._memory = memoryview(bytearray(size))
        self._memory[:num] = before[self._first : self._end]
        self._first, self._end = 0, num
        assert num < len(self._memory), "a frame that has come was not taken"
        return self._memory[num:]

    def received(self, num_bytes: int) -> None:
        """Note that bytes were received into ``memory``."""
        self._end += num_bytes

    @property
    def has_next(self) -> bool:
        """Whether a whole frame has come."""
        return 0 < self._next_bytes() <= self._end - self._first

    def next(self) -> memoryview | None:
        """Return the content of the next frame, valid until ``memory`` is called; None for none.

        Raises ``ProtocolError`` for a frame above ``most_bytes``.
        """
        first = self._first + FRAME_HEADER.size
        if first > self._end:
            return None
        size: int = FRAME_HEADER.unpack_from(self._memory, self._first)[0]
        if size > self.most_bytes:
            raise ProtocolError(f"a frame of {size} bytes is above the most of {self.most_bytes}")
        if first + size > self._end:
            return None
        self._first = first + size
        return self._memory[first : self._first]

    def _next_bytes(self) -> int:
        """Return the length of the next frame with its header; 0 while it is unknown."""
        if self._end - self._first < FRAME_HEADER.size:
            return 0
        size: int = FRAME_HEADER.unpack_from(self._memory, self._first)[0]
        return FRAME_HEADER.size + size


def receive(connection: socket.socket, frames: Frames) -> tuple[int, list[int]]:
    """Receive a part of a stream with file descriptors. Return its length and these."""
    space = socket.CMSG_LEN(MAX_FDS * FD_BYTES)
    num, told, _, _ = connection.recvmsg_into([frames.memory()], space)
    frames.received(num)
    fds = array("i")
    for level, kind, content in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % FD_BYTES])
    return num, fds.tolist()


def turns_of(num: int) -> Iterator[slice]:
    """Return the positions of ``num`` keys or slots, ``MAX_AT_ONCE`` at a time."""
    return (slice(at, min(at + MAX_AT_ONCE, num)) for at in range(0, num, MAX_AT_ONCE))


def pack(numbers: Sequence[int] | Int64s) -> bytes:
    """Return integers as int64 bytes."""
    return np.asarray(numbers, "<i8").tobytes()


def unpack(content: bytes | bytearray) -> Int64s:
    """Return the integers of ``pack``. Raises ``ProtocolError`` for a wrong length."""
    if len(content) % 8:
        raise ProtocolError(f"{len(content)} bytes are no whole number of integers")
    return np.frombuffer(content, "<i8")


def split_keys(keys: bytes, key_bytes: int) -> PackedKeys:
    """Return concatenated keys. Raises ``ProtocolError`` for a part of one, or too many."""
    if len(keys) % key_bytes:
        raise ProtocolError(f"{len(keys)} bytes are no whole number of keys of {key_bytes} bytes")
    if len(keys) > MAX_KEYS * key_bytes:
        raise ProtocolError(f"{len(keys) // key_bytes} keys are more than {MAX_KEYS}")
    return PackedKeys(keys, key_bytes)
