"""KV events of a node: what it holds of each model, published once for all engines of a machine.

    an engine                     the node's thread               the publisher's thread
    DescribeNotice  ----------->  NodeEvents  -- appends -->      KeyedEvents  -->  events

A node knows keys only. Engines describe blocks by hashes and tokens while they store or look them
up; a block without a description is not published.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from kvtier.core.keys import TOKEN_DTYPE, PackedKeys
from kvtier.core.types import DISK
from kvtier.index import State
from kvtier.node.config import EventsAddress
from kvtier.node.server.partition import Partition
from kvtier.node.wire.protocol import (
    MAX_EXTRA_BYTES,
    UNREADABLE,
    DescribeNotice,
    ProtocolError,
    split_keys,
)
from kvtier.observe.block_events import (
    CLEARED,
    MAX_AT_ONCE,
    TOKEN_BYTES,
    ChangeLog,
    Event,
    medium_of,
    stored,
)
from kvtier.observe.publisher import Publisher, is_local

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Memory for the descriptions of one address. Those that engines sent longest ago leave first."""
BLOCK_BYTES = 520
"""Memory that a description needs beside its content."""
LOGGED_BYTES = 256
"""Bytes of a description that count as one block while it waits for the publisher."""
DYNAMO_SALT = "dynamo-cache-salt:"
"""Dynamo's front end puts it before salts; descriptions have salts without it."""
HASH_BYTES = 8
"""Length of a hash that is published as an integer."""
MAX_BLOCK_TOKENS = 1 << 16
"""Blocks with more tokens are not published."""
MAX_TEXT_BYTES = 1 << 10
"""Nor are those with longer texts, such as salts: each event of a block has them."""
MAX_EVENT_BYTES = 64 << 10
"""Bytes of tokens beyond which a run of blocks has another event."""
MAX_GROUPS = 1 << 10
MAX_WARNED = 256
"""Most different warnings in the log."""


class Described(NamedTuple):
    """Blocks that an engine has described.

    room: number of their partition. blocks: their keys. tiers: of the partition. states: uint8
    [num_keys, num_tiers], of each block. notice: the description.
    """

    room: int
    blocks: PackedKeys
    tiers: Sequence[str]
    states: bytes
    notice: DescribeNotice

    @property
    def size(self) -> int:
        return max(len(self.blocks), self.notice.num_bytes // LOGGED_BYTES)


class KeysMoved(NamedTuple):
    """Blocks that entered a tier of a partition, or left it."""

    room: int
    blocks: Sequence[bytes]
    tier: str
    is_removed: bool

    @property
    def size(self) -> int:
        return len(self.blocks)


Change = Described | KeysMoved


@dataclass(slots=True, eq=False)
class _Block:
    """A block with a description.

    facts: the description without its blocks. parent: the hash before the block. extra_keys: of
    its own hashes, as a description has them. num_bytes: memory that it needs. where: bit set of
    its tiers.
    """

    facts: DescribeNotice
    parent: bytes
    hashes: bytes
    tokens: bytes
    extra_keys: bytes
    num_bytes: int
    where: int = 0

    @property
    def last_hash(self) -> bytes:
        return self.hashes[-self.facts.hash_bytes :]


class KeyedEvents:
    """Turns changes of a partition's tiers into events, as ``BlockEvents`` does for tokens.

    It publishes one partition: that of the last description. tiers: of the node.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        self._bits = {tier: 1 << at for at, tier in enumerate(tiers)}
        self._media = {tier: medium_of(tier, tier != DISK) for tier in tiers}
        self.clear()

    def clear(self) -> None:
        """Forget all blocks, until engines describe them again."""
        self._room: int | None = None
        self._known: OrderedDict[bytes, _Block] = OrderedDict()
        self._named: dict[bytes, bytes] = {}  # keys of blocks of text, by ``_digest``
        self._sizes: dict[int, int] = {}  # bytes of a block's tokens, by KV group
        self._num_bytes = 0

    def of(self, changes: Sequence[Change]) -> Iterator[Event]:
        """Yield the events of some changes."""
        for change in changes:
            if isinstance(change, Described):
                yield from self._describe(change)
            elif change.room == self._room:
                blocks = [self._known[key] for key in change.blocks if key in self._known]
                yield from self._move(blocks, change.tier, change.is_removed)

    def _describe(self, change: Described) -> Iterator[Event]:
        if change.room != self._room:
            if self._known:
                yield CLEARED
            self.clear()
            self._room = change.room
        blocks = self._learn(list(change.blocks), change.notice)
        states = np.frombuffer(change.states, np.uint8).reshape(len(blocks), -1)
        for tier, its in zip(change.tiers, (states == State.READY).T.tolist(), strict=True):
            for is_removed in True, False:
                pairs = zip(blocks, its, strict=True)
                some = [block for block, is_there in pairs if is_there != is_removed]
                yield from self._move(some, tier, is_removed)
        forgotten = []
        while self._num_bytes > MAX_BYTES:
            key, block = self._known.popitem(last=False)
            self._num_bytes -= block.num_bytes
            if self._named.get(name := _name(block)) == key:
                del self._named[name]
            forgotten.append(block)
        for tier in self._bits:  # routers forget them, too
            yield from self._move(forgotten, tier, is_removed=True)

    def _learn(self, keys: Sequence[bytes], notice: DescribeNotice) -> list[_Block]:
        """Return the blocks with these keys; remember those that are new."""
        without = dict.fromkeys(("keys", "hashes", "parent", "tokens", "extra_keys"), b"")
        facts = replace(notice, **without, is_first=False)
        size, num_token_bytes = len(notice.hashes) // len(keys), len(notice.tokens) // len(keys)
        num_bytes = BLOCK_BYTES + size + num_token_bytes + notice.num_text_bytes
        extra_keys = _extra_keys(notice.extra_keys)
        self._sizes[notice.group] = num_token_bytes
        found, above = [], notice.parent
        for at, key in enumerate(keys):
            hashes = notice.hashes[at * size : (at + 1) * size]
            if key in self._known:
                self._known.move_to_end(key)
            else:
                tokens = notice.tokens[at * num_token_bytes : (at + 1) * num_token_bytes]
                first = at * size // notice.hash_bytes
                own = extra_keys[first : first + size // notice.hash_bytes]
                extra = msgspec.msgpack.encode(own) if any(own) else b""
                block = _Block(facts, above, hashes, tokens, extra, num_bytes + len(extra))
                self._known[key] = block
                self._num_bytes += block.num_bytes
                if notice.lora_name is None and _is_text(notice.salt, own):
                    self._named[_name(block)] = key
            found.append(self._known[key])
            above = found[-1].last_hash
        return found

    def find(self, room: int, tokens: bytes, salt: str) -> tuple[int, list[bytes]] | None:
        """Return the tokens of a block, and the keys of a prompt's first blocks. Thread-safe.

        Prompts with an adapter or media are not found. None if the model has several KV groups.
        room: number of the partition.
        """
        sizes, named, known = dict(self._sizes), self._named, self._known
        if self._room != room or not sizes:  # its first description is on its way
            return 0, []
        if len(sizes) > 1:
            return None
        ((group, size),) = sizes.items()
        keys: list[bytes] = []
        above = b""
        for at in range(0, len(tokens) - size + 1, size):
            key = named.get(_digest(group, above, salt, tokens[at : at + size]))
            block = None if key is None else known.get(key)
            if key is None or block is None:
                break
            keys.append(key)
            above = block.last_hash
        return size // TOKEN_BYTES, keys

    def _move(self, blocks: Iterable[_Block], tier: str, is_removed: bool) -> Iterator[Event]:
        """Yield the events of blocks that are new in a tier, or have left it."""
        bit = self._bits[tier]
        moved = [block for block in blocks if bool(block.where & bit) == is_removed]
        for block in moved:
            block.where ^= bit
        if not is_removed:
            yield from self._stored(moved, tier)
            return
        for group, some in groupby(moved, lambda block: block.facts.group):
            hashes = [one for block in some for one in _hashes(block)]
            event = {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": group}
            yield {**event, **self._media[tier]}

    def _stored(self, blocks: Sequence[_Block], tier: str) -> Iterator[Event]:
        """Yield an event for each run of blocks one behind the other."""
        first, num_bytes = 0, 0
        for end in range(1, len(blocks) + 1):
            num_bytes += len(blocks[end - 1].tokens)
            if (
                end == len(blocks)
                or end - first == MAX_AT_ONCE
                or num_bytes >= MAX_EVENT_BYTES
                or blocks[end].parent != blocks[end - 1].last_hash
                or blocks[end].facts != blocks[first].facts
            ):
                yield {**_event(blocks[first:end]), **self._media[tier]}
                first, num_bytes = end, 0

    def snapshot(self) -> Iterator[Event]:
        """Yield events that bring a new reader to the present state.

        A block is left out if the block before it is in no tier. Cost: O(described blocks).
        """
        behind: dict[tuple[int, bytes], list[_Block]] = {}
        for block in self._known.values():
            if block.where:
                behind.setdefault((block.facts.group, block.parent), []).append(block)
        ready = [block for (_, parent), some in behind.items() if not parent for block in some]
        ordered = []
        while ready:
            ordered.append(ready.pop())
            ready += behind.pop((ordered[-1].facts.group, ordered[-1].last_hash), ())
        for tier, bit in self._bits.items():
            yield from self._stored([block for block in ordered if block.where & bit], tier)


def _event(blocks: Sequence[_Block]) -> Event:
    """Return the event of blocks one behind the other, without their medium."""
    facts, parent = blocks[0].facts, blocks[0].parent
    tokens = np.frombuffer(b"".join(block.tokens for block in blocks), TOKEN_DTYPE).tolist()
    hashes = [one for block in blocks for one in _hashes(block)]
    extra_keys = [one for block in blocks for one in _own_extra_keys(block)]
    return {
        **stored(
            hashes,
            _split(parent, facts.hash_bytes)[0] if parent else None,
            tokens,
            facts.block_size,
            facts.salt,
        ),
        "lora_id": facts.lora_id,
        "lora_name": facts.lora_name,
        "extra_keys": extra_keys if any(extra_keys) else None,
        "group_idx": facts.group,
        "kv_cache_spec_kind": facts.kind,
    }


def _name(block: _Block) -> bytes:
    """Return what identifies a block of text behind the block before it."""
    facts = block.facts
    return _digest(facts.group, block.parent, facts.salt or "", block.tokens)


def _digest(group: int, parent: bytes, salt: str, tokens: bytes) -> bytes:
    own = b"" if parent else salt.encode()  # later blocks follow from the first one
    return blake3(b"%d %d " % (group, len(own)) + own + parent + tokens).digest(16)


def _is_text(salt: str | None, extra_keys: Sequence[object]) -> bool:
    """Whether a block is determined by its tokens, those before it and the salt."""
    known = [one for one in extra_keys if one is not None]
    return not known or (salt is not None and known in ([[salt]], [[DYNAMO_SALT + salt]]))


def _hashes(block: _Block) -> list[int] | list[bytes]:
    return _split(block.hashes, block.facts.hash_bytes)


def _split(hashes: bytes, hash_bytes: int) -> list[int] | list[bytes]:
    """Return hashes as engines publish them: integers, or bytes if they are longer."""
    parts = [hashes[at : at + hash_bytes] for at in range(0, len(hashes), hash_bytes)]
    return [int.from_bytes(one, "little") for one in parts] if hash_bytes == HASH_BYTES else parts


def _extra_keys(content: bytes) -> list[object]:
    try:
        return msgspec.msgpack.decode(content, type=list) if content else []
    except UNREADABLE:
        return []


def _own_extra_keys(block: _Block) -> list[object]:
    """Return what each hash of a block covers besides tokens."""
    return _extra_keys(block.extra_keys) or [None] * len(_hashes(block))


class _Address:
    """An address, and what is published there. name: its model; "" until one claims it."""

    def __init__(self, name: str, address: EventsAddress, tiers: Sequence[str]) -> None:
        self.model = name
        self.published: Partition | None = None
        self.log: ChangeLog[Change] = ChangeLog()
        self.publisher = Publisher(self.log, address.endpoint, address.replay, address.topic)
        self.events = KeyedEvents(tiers)
        self.publisher.start(self.events)


class NodeEvents:
    """Addresses of a node, and which partition is published at each. Owned by the node's thread.

    Args:
        addresses: by model, or by tenant and model as in "team-a/model"; one of "" is for the first
            model that is described and has none of its own.
        tiers: of the node.
        tenants: known tenants. The address "team-a/model" is closed to others if team-a is known.

    Raises:
        ConfigError: an address can't be bound, or a package is missing.
    """

    def __init__(
        self,
        addresses: Mapping[str, EventsAddress],
        tiers: Sequence[str],
        tenants: Collection[str] = (),
    ) -> None:
        self._tenants = tenants
        self._addresses: dict[str, _Address] = {}
        self._warned: set[tuple[str, ...]] = set()  # what a warning was about
        try:
            for name, address in addresses.items():
                self._addresses[name] = _Address(name, address, tiers)
                if not is_local(address.endpoint):
                    logger.warning(
                        "anyone who can reach %s reads the token ids of all prompts; bind it to a "
                        "network with routers only",
                        address.endpoint,
                    )
        except BaseException:
            self.close()
            raise

    def endpoints(self, model: str) -> list[str]:
        """Return the endpoints of events and replay, for callers that bound port 0."""
        return self._addresses[model].publisher.endpoints

    def describe(self, number: int, partition: Partition, notice: DescribeNotice) -> None:
        """Publish blocks of a partition that an engine describes. number: of the partition.

        Raises ``ProtocolError`` for a description of the wrong size.
        """
        keys = split_keys(notice.keys, partition.key.key_bytes)
        _check(notice, keys)
        address = self._address(partition.key.tenant, notice.model)
        if address is None:
            return
        if address.published is not partition:
            if not notice.is_first:
                return
            self._publish(number, partition, address)
        has_long = len(notice.tokens) > len(keys) * MAX_BLOCK_TOKENS * TOKEN_BYTES
        if notice.num_text_bytes <= MAX_TEXT_BYTES and not has_long:
            address.log.put(Described(number, keys, *partition.tier_states(keys), notice))

    def _address(self, tenant: str, model: str) -> _Address | None:
        """Return the address of a tenant's model: an address belongs to its first tenant."""
        name, (first, slash, _) = f"{tenant}/{model}", model.partition("/")
        found, rest = self._addresses.get(name), self._addresses.get("")
        is_others = slash and first != tenant and first in self._tenants
        if found is None and model and not is_others:
            found = self._addresses.get(model)
        if found is None and rest is not None and rest.model in ("", name):
            rest.model, found = name, rest
        holder = None if found is None else found.published
        if found is not None and (holder is None or holder.key.tenant == tenant):
            return found
        self._warn_once("no events of %s: give --events %s=ADDRESS", name, model)
        return None

    def _warn_once(self, message: str, *about: str) -> None:
        if about not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(about)
            logger.warning(message, *about)

    def _publish(self, number: int, partition: Partition, address: _Address) -> None:
        """Publish another partition at an address.

        An engine that begins to describe claims it: usually one with newer weights.
        """
        if address.published is not None:
            address.published.on_move = None
            self._warn_once(
                "events of %s are of room %s from now on, no longer of %s",
                address.model,
                partition.key.name,
                address.published.key.name,
            )
        address.published = partition
        put = address.log.put
        partition.on_move = lambda tier, keys, is_removed: put(
            KeysMoved(number, keys, tier, is_removed)
        )

    def find(
        self, number: int, partition: Partition, tokens: bytes, salt: str
    ) -> tuple[int, list[bytes]] | None:
        """Find a prompt's blocks by its tokens; see ``KeyedEvents.find``. None if not published."""
        for address in self._addresses.values():
            if address.published is partition:
                return address.events.find(number, tokens, salt)
        return None

    def close(self) -> None:
        for address in self._addresses.values():
            address.publisher.close()


def _check(notice: DescribeNotice, keys: PackedKeys) -> None:
    """Raise ``ProtocolError`` for a description whose parts don't agree."""
    num_keys = len(keys)
    if len(set(keys)) < num_keys:
        raise ProtocolError("a description names a block twice")
    size, hash_bytes = notice.block_size, notice.hash_bytes
    num, rest = divmod(len(notice.hashes), max(1, hash_bytes) * max(1, num_keys))
    is_right = num_keys > 0 and size > 0 and hash_bytes > 0 and num > 0 and not rest
    is_right &= len(notice.parent) in (0, hash_bytes)
    is_right &= 0 <= notice.group < MAX_GROUPS
    is_right &= len(notice.extra_keys) <= MAX_EXTRA_BYTES * num * num_keys
    if not is_right or len(notice.tokens) != num * num_keys * size * TOKEN_BYTES:
        raise ProtocolError("keys, hashes and tokens of a description don't agree")
