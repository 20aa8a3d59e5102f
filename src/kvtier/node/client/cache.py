"""``BlockCache`` of one engine in a node: the node's client.

The node is not asked about blocks that this engine has seen in slots whose generations are the same
(``seen.py``). The ranks map the node's memory and copy themselves (``host.py``). Each request has a
deadline; without an answer in time the engine computes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from threading import Thread
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.cache.block_cache import (
    BlockCache,
    BlockLookup,
    BlockState,
    Change,
    Held,
    Reserved,
    TierUsage,
)
from kvtier.cache.guard import PartitionFacts, SlotGuard
from kvtier.cache.ladder import CostMetrics
from kvtier.cache.local import states_of
from kvtier.cache.waiters import Signal
from kvtier.core.hints import BlockHint, Hint, HintOutcome, HintResult, waits
from kvtier.core.types import DEVICE, HOST, Slot
from kvtier.node.client.channel import Channel, NodeClient, NodeError, OpenedPartition, SlotNotice
from kvtier.node.client.seen import SeenBlocks
from kvtier.node.wire import protocol
from kvtier.observe import Metrics
from kvtier.observe.specs import HINTS, PROBED_BLOCKS
from kvtier.plan import CostModel, Costs, num_to_probe, ways_of
from kvtier.plan.decide import Awaited

Answer = TypeVar("Answer")

BLOCK_S = 2e-6
"""Time that a request may take longer per block. A busy node needs a tenth to a half of it, and the
longer a prompt is, the more it costs to compute."""
MAX_DESCRIBED = 1 << 16
"""Blocks that are known to be described to the node."""
DESCRIBED_S = 600.0
"""A block is described again after this time, if it is used: the node forgets the oldest ones."""
COSTS_S = 1.0
"""Shortest time between two reports of what was measured."""
OPEN_S = 10.0
"""Longest wait for a partition, off the engine's thread."""
OPEN_WAIT_S = 0.25
"""Longest wait of requests for a partition that is being opened."""


@dataclass(slots=True, eq=False)
class NodeSignal:
    """Signal that ends once the node has sent an ``EndedNotice``, or the connection is lost.

    client, channel: the connection. watch: number of the notice.
    """

    client: NodeClient
    channel: Channel
    watch: int

    @property
    def is_over(self) -> bool:
        self.client.hear(self.channel)
        return self.channel.has_ended(self.watch)


@dataclass(frozen=True, slots=True, eq=False)
class PartitionOpening:
    """Signal that ends when a partition is open or can't be opened, and in any case at ``until_s``.

    thread: opens the partition. until_s: by ``time.monotonic``.
    """

    thread: Thread
    until_s: float

    @property
    def is_over(self) -> bool:
        return not self.thread.is_alive() or time.monotonic() >= self.until_s


class NodeCache(BlockCache):
    """Cache of one engine in a node. Owned by one thread.

    Keys are the engine's, of one length. Nothing raises because of the node: without it every block
    is nowhere, and nothing is stored.

    Args:
        client: connections to the node.
        namespace: return the digest of everything else that decides on the bytes of a block; b""
            while it is unknown. A new digest is a new partition, and forgets all leases.
        block_bytes: bytes of a block, of all ranks together.
        deadline_s: longest wait for an answer, and ``BLOCK_S`` more per block.
        clock: seconds.
        group_bytes: bytes at the end of a key that name its KV group; see ``KeyIndex``.
    """

    learns = True
    is_busy = False
    """The node's own thread carries out what moves there; an engine need not poll for it."""

    def __init__(
        self,
        client: NodeClient,
        namespace: Callable[[], bytes],
        block_bytes: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        group_bytes: int = 0,
    ) -> None:
        self.metrics = Metrics(is_exposed=False)
        self._model = CostModel()
        self.costs = CostMetrics(self.metrics, self._model, clock)
        self._storages: list[str] = []
        self._client = client
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._group_bytes = group_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._partition = _Partition(PartitionFacts(b"", block_bytes, 0), "", 0)
        self._opening: PartitionOpening | None = None
        self._watches = count(1 << 32)
        self._states: dict[bytes, BlockState] = {}  # of the last look-ups
        self._sources: dict[bytes, str] = {}
        self._unread: list[_LookedUp] = []
        self._reads: list[_Read] = []
        self._probed_s: dict[str, float] = {}
        self._next_costs_s = -inf
        self._ending: list[tuple[str, SlotNotice]] = []  # notices, with the memory they are about

    # -- locations ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], has_gaps: bool = False) -> BlockLookup[Awaited]:
        """Look up a prompt's blocks.

        The first ones are in memory, as far as they were seen there before. The node looks up the
        others, and leases those in memory until the next ``poll``. While the partition is being
        opened, all blocks are ``UNKNOWN`` for a short time.
        """
        num = self._num_seen(keys)
        states = [BlockState.MEMORY] * num
        if num:
            self._unread.append(_LookedUp(keys[:num], states, None))
        if num == len(keys):
            return BlockLookup(states, [])
        found = self._look_up(keys[num:], has_gaps)
        return BlockLookup(states + found.states, found.answers)

    def _num_seen(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks are in memory, as the slots' generations show."""
        if not keys or self._client.breaker.is_open:  # only an answer can close it
            return 0
        try:
            channel = self._take(keys)
        except NodeError:
            return 0
        if channel is None:
            return 0
        partition = self._partition
        opened = channel.partition(partition.facts, 0.0)
        self._client.keep(channel)
        return partition.seen.num_there(keys, opened.generations)

    def forget_seen(self) -> None:
        """Have the node look up all blocks once more, as for a new engine."""
        self._partition.seen.forget()

    def _look_up(self, keys: Sequence[bytes], has_gaps: bool = False) -> BlockLookup[Awaited]:
        """Have the node look up blocks, and lease those in memory until the next ``poll``."""
        request = protocol.LookupRequest(0, 0, b"".join(keys), has_gaps)
        found = self._ask(keys, request, protocol.LookupAnswer)
        if found is None:
            opening = self._opening
            if opening is None or opening.is_over:
                return BlockLookup([BlockState.NOWHERE] * len(keys), [])
            return BlockLookup([BlockState.UNKNOWN] * len(keys), [opening])
        answer, channel = found
        states = states_of(answer.places)
        looked_up = _LookedUp(list(keys), states, answer)
        self._unread.append(looked_up)
        seen = self._partition.seen
        if seen.is_asked_again(keys[0]):
            slots, generations = map(protocol.unpack, (answer.slots, answer.generations))
            seen.note(_ready(looked_up.keys, answer), slots, generations)
        answers = [NodeSignal(self._client, channel, answer.id)] if answer.pending else []
        return BlockLookup(states, answers)

    def lookup_again(self, key: bytes, before: BlockState | None = None) -> BlockState:
        """Return the state of one block, as the last look-up since ``poll`` found it.

        A look-up adopts all that the node's storage has recovered, so ``NOWHERE`` stays.
        """
        if before is BlockState.NOWHERE:
            return before
        self._read_answers()
        state = self._states.get(key)
        return self.lookup([key]).states[0] if state is None else state

    def lookup_private(self, keys: Sequence[bytes]) -> list[BlockState]:
        """Return ``NOWHERE`` for each block: a node keeps none that must stay in one process."""
        return [BlockState.NOWHERE] * len(keys)

    def _read_answers(self) -> None:
        """Index the results of the last look-ups by key.

        It is done when a block is first used, since most look-ups lead to no copy.
        """
        tiers = (HOST, *self._storages)
        unread, self._unread = self._unread, []
        for keys, states, answer in unread:
            self._states.update(zip(keys, states, strict=True))
            if answer is not None:
                sources = map(tiers.__getitem__, answer.sources)
                self._sources.update(zip(keys, sources, strict=True))
                self._note_leases(keys, answer)

    def _note_leases(self, keys: Sequence[bytes], answer: protocol.LookupAnswer) -> None:
        """Note the leases that an answer has brought."""
        leases = self._partition.leases
        slots = protocol.unpack(answer.slots).tolist()
        generations = protocol.unpack(answer.generations).tolist()
        for key, slot, generation in zip(_ready(keys, answer), slots, generations, strict=True):
            leases.setdefault(key, _Lease(slot, generation)).num += 1

    def sources(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier that each block would be read from, as the last look-up found it."""
        self._read_answers()
        return [self._sources.get(key, HOST) for key in keys]

    def origins(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier from which each block in memory was brought for this engine."""
        return [self._partition.brought.get(key, HOST) for key in keys]

    # -- slots -------------------------------------------------------------------------------------

    def hold(self, keys: Sequence[bytes]) -> Held:
        """Return the slots of blocks in memory, to copy from. They are held until ``release``.

        A block that is not leased yet is leased now. One that has left memory since it was looked
        up gets a slot that fails the check after the copy.
        """
        self._read_answers()
        if unleased := [key for key in keys if key not in self._partition.leases]:
            request = protocol.LookupRequest(0, 0, b"".join(unleased))
            if (found := self._ask(unleased, request, protocol.LookupAnswer)) is not None:
                self._note_leases(unleased, found[0])
        partition = self._partition
        leases = [partition.leases.get(key) for key in keys]
        if None in leases:  # the node is asked about them from now on
            left = [key for key, lease in zip(keys, leases, strict=True) if lease is None]
            partition.seen.note(left, np.array(0), np.array(-1))
        for lease in leases:
            if lease is not None:
                lease.num_holds += 1
        slots = [Slot(0) if lease is None else lease.slot for lease in leases]
        generations = [-1 if lease is None else lease.generation for lease in leases]
        return Held(slots, SlotGuard(partition.instance, partition.facts, generations))

    def release(self, keys: Collection[bytes]) -> None:
        given_back = []
        for key in keys:
            lease = self._partition.leases.get(key)
            if lease is not None and lease.num_holds:
                lease.num_holds -= 1
                if lease.num > lease.num_holds:
                    lease.num -= 1
                    given_back.append(lease.slot)
                self._partition.brought.pop(key, None)
                if not lease.num:
                    del self._partition.leases[key]
        self._give_back(protocol.pack(given_back))

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        wanted = list(dict.fromkeys(keys))
        request = protocol.ReserveRequest(0, 0, b"".join(wanted))
        found = self._ask(wanted, request, protocol.ReserveAnswer)
        if found is None:
            return None
        answer, _ = found
        new = [key for key, is_new in zip(wanted, answer.new, strict=True) if is_new]
        if not new and not all(answer.known):
            return None
        slots = protocol.unpack(answer.slots).tolist()
        generations = protocol.unpack(answer.generations).tolist()
        for key, slot, generation in zip(new, slots, generations, strict=True):
            self._partition.reserved[key] = _Lease(slot, generation)
        partition = self._partition
        return Reserved(new, slots, [], SlotGuard(partition.instance, partition.facts, ()))

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """Note that blocks have been copied into their slots.

        Blocks that must not be shared with other processes are aborted instead.
        """
        if not to_storage:
            self.abort(keys)
            return
        reserved = self._partition.reserved
        mine = [(key, at) for key, at in zip(keys, depths, strict=True) if key in reserved]
        filled = [reserved.pop(key) for key, _ in mine]
        if filled:
            slots, generations = np.array([(it.slot, it.generation) for it in filled]).T
            self._partition.seen.note([key for key, _ in mine], slots, generations)
            depths = protocol.pack([at for _, at in mine])
            self._notify(protocol.CommitNotice(0, protocol.pack(slots), depths))

    def abort(self, keys: Iterable[bytes]) -> None:
        reserved = self._partition.reserved
        slots = protocol.pack([reserved.pop(key).slot for key in keys if key in reserved])
        if slots:
            self._notify(protocol.AbortNotice(0, slots))

    def distrust(self, slots: Collection[Slot]) -> None:
        if not slots:
            return
        self.forget_seen()
        for lease in self._partition.reserved.values():
            if lease.slot in slots:
                lease.generation = -1
        self._notify(protocol.DistrustNotice(0, protocol.pack(list(slots))))

    def _give_back(self, slots: bytes) -> None:
        if slots:
            self._notify(protocol.ReleaseNotice(0, slots))

    # -- between memory and storage ----------------------------------------------------------------

    def promote(self, keys: Sequence[bytes], ready_keys: Sequence[bytes] = ()) -> int:
        request = protocol.PromoteRequest(0, 0, b"".join(keys), b"".join(ready_keys))
        found = self._ask(keys, request, protocol.PromoteAnswer)
        if found is None:
            return 0
        begun = keys[: found[0].num]
        self._partition.brought.update(zip(begun, self.sources(begun), strict=True))
        return len(begun)

    def probe(self, keys: Sequence[bytes]) -> None:
        wanted: dict[str, list[bytes]] = {}
        for key, tier in zip(keys, self.sources(keys), strict=True):
            if tier != HOST:
                wanted.setdefault(tier, []).append(key)
        now_s, reading = self._clock(), {read.tier for read in self._reads}
        for tier, some in wanted.items():
            last = self._model.last_copy((tier, HOST))
            if last is None:
                continue
            seen_s, last_s = last
            quiet_s = now_s - max(seen_s, self._probed_s.get(tier, -inf))
            num = num_to_probe(len(some), self._block_bytes, quiet_s, last_s)
            if num and tier not in reading:
                self._probed_s[tier] = now_s
                self.metrics.count(PROBED_BLOCKS, num, src=tier)
                if num := self.promote(some[:num]):
                    self.wait_for_reads(some[:num])

    def wait_for_reads(self, keys: Sequence[bytes]) -> NodeSignal | Signal:
        watch = next(self._watches)
        channel = self._notify(protocol.WatchNotice(0, watch, b"".join(keys)))
        if channel is None:
            return Signal(is_over=True)
        signal, now_s = NodeSignal(self._client, channel, watch), self._clock()
        for tier, num in Counter(self.sources(keys)).items():
            if tier != HOST:
                channel.time_watch(watch)
                self._reads.append(_Read(signal, tier, num * self._block_bytes, now_s))
        return signal

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, keys: Collection[bytes]) -> None:
        if keys:
            self._notify(protocol.UseNotice(0, b"".join(keys)))

    def on_request(self, keys: Iterable[bytes]) -> None:
        if joined_keys := b"".join(keys):
            self._notify(protocol.PromptNotice(0, joined_keys))

    def continues(self, keys: Iterable[bytes], last_key: bytes) -> None:
        if joined_keys := b"".join(keys):
            self._notify(protocol.ContinueNotice(0, joined_keys, last_key))

    def hint(self, keys: Collection[bytes], hint: Hint, block_size: int) -> Sequence[HintResult]:
        self._send_hints(keys, hint.block_hint(block_size, 0.0))
        sent = hint.declined(HintOutcome.SENT)
        for result in sent:
            self.metrics.count(HINTS, action=result.action, outcome=result.outcome)
        return sent

    def wait(self, keys: Collection[bytes], is_waiting: bool) -> None:
        self._send_hints(keys, [waits(is_waiting, 0.0)])

    def _send_hints(self, keys: Collection[bytes], block_hints: Sequence[BlockHint]) -> None:
        """Send retention hints on blocks. Their times are seconds from now."""
        if keys and block_hints:
            statements = [(it.word, it.level, it.first, it.end, it.until) for it in block_hints]
            self._notify(protocol.HintNotice(0, b"".join(keys), statements))

    # -- descriptions ------------------------------------------------------------------------------

    @property
    def wants_descriptions(self) -> bool:
        """Whether the node publishes events, and needs descriptions of blocks."""
        return self._partition.describes

    def undescribed(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the blocks that were not described to the node lately."""
        since_s, described = self._clock() - DESCRIBED_S, self._partition.described
        return [key for key in keys if described.get(key, -inf) < since_s]

    def describe(self, keys: Sequence[bytes], notice: protocol.DescribeNotice) -> None:
        """Describe blocks to the node. notice: with all fields but ``keys`` and ``is_first``."""
        its = self._partition
        notice.keys, notice.is_first = b"".join(keys), not its.described
        if self._notify(notice) is None:  # it is sent again with the next use
            return
        its.described.update(dict.fromkeys(keys, self._clock()))
        while len(its.described) > MAX_DESCRIBED:
            its.described.popitem(last=False)

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Release the leases of look-ups that were not held, and note reads that have ended."""
        self._release_unheld()
        self._states.clear()
        self._sources.clear()
        now_s = self._clock()
        if self._partition.describes and now_s >= self._next_costs_s:
            self._next_costs_s = now_s + COSTS_S
            self._report_costs()
        for read in [read for read in self._reads if read.signal.is_over]:
            self._reads.remove(read)
            # The node's own measure: here the end is noticed only in the engine's next step.
            seconds = read.signal.channel.take_seconds(read.signal.watch) or now_s - read.since_s
            self._model.observe_copy((read.tier, HOST), read.num_bytes, seconds, now_s)

    def _report_costs(self) -> None:
        """Send what was measured, for estimates of what a prompt would cost here."""
        costs = self.cost_snapshot()
        copies = [
            (*route, size, seconds, costs.num_copies[route][size])
            for route, sizes in costs.seconds_per_byte.items()
            for size, seconds in sizes.items()
        ]
        known = costs.prefill
        prefill = None if known is None else (known.token_s, known.pair_s)
        self._notify(
            protocol.CostsNotice(0, copies[: protocol.MAX_MEASURED], prefill, costs.num_prefills)
        )

    def _release_unheld(self) -> None:
        for each in self._unread:
            if each.answer is not None:
                self._give_back(each.answer.slots)
        self._unread.clear()
        given_back: list[Slot] = []
        leases = self._partition.leases
        for key in [key for key, lease in leases.items() if lease.num > lease.num_holds]:
            lease = leases[key]
            given_back += [lease.slot] * (lease.num - lease.num_holds)
            lease.num = lease.num_holds
            if not lease.num:
                del leases[key]
        self._give_back(protocol.pack(given_back))

    @property
    def storages(self) -> Sequence[str]:
        return self._storages

    def cost_snapshot(self) -> Costs:
        return self._model.snapshot(
            ways=ways_of((DEVICE, HOST), self._storages, ()),
            witnesses={(HOST, DEVICE): None},
            trial_bytes=self._block_bytes,
            now_s=self._clock(),
        )

    def usage(self) -> Mapping[str, TierUsage]:
        return {}

    def clear(self) -> None:
        """Give up everything that this engine uses. The engine's blocks stay in the node."""
        self.end_copies()

    def end_copies(self) -> None:
        """Forget the engine's own copies, whose ends will not be reported.

        Their slots stay in use until ``copies_have_ended``: a rank may still copy from or to them.
        """
        self._release_unheld()
        partition = self._partition
        reserved = [lease.slot for lease in partition.reserved.values()]
        leased = [lease.slot for lease in partition.leases.values() for _ in range(lease.num)]
        for kind, slots in (protocol.AbortNotice, reserved), (protocol.ReleaseNotice, leased):
            if slots:
                notice = kind(partition.number, protocol.pack(slots))
                self._ending.append((partition.instance, notice))
        partition.reserved.clear()
        partition.leases.clear()

    def copies_have_ended(self) -> None:
        """Release the slots of copies that ``end_copies`` forgot. All must have ended by now."""
        ending, self._ending = self._ending, []
        for instance, notice in ending:
            self._client.tell(instance, notice)

    def check_invariants(self) -> None:
        partition = self._partition
        assert all(lease.num > 0 and lease.num_holds >= 0 for lease in partition.leases.values())
        assert partition.leases.keys().isdisjoint(partition.reserved), (
            "copied to and from at a time"
        )

    def take_changes(self) -> list[Change]:
        """Return nothing: the node publishes which blocks enter and leave its tiers."""
        return []

    def close(self) -> bool:
        if self._opening is not None:
            self._opening.thread.join()
        self.end_copies()
        self.copies_have_ended()
        self._client.close()
        return True

    # -- the node ----------------------------------------------------------------------------------

    def _ask(
        self,
        keys: Sequence[bytes],
        request: protocol.PartitionRequest,
        kind: type[Answer],
    ) -> tuple[Answer, Channel] | None:
        """Return the answer to a request and its connection; None if there is no answer.

        keys: some keys. request: its number and that of the partition are set here.
        """
        until_s = time.monotonic() + self._deadline_s + BLOCK_S * len(keys)
        try:
            channel = self._take(keys)
            if channel is None:
                return None
            with self._client.using(channel):
                request.partition = self._partition.number
                return channel.request(request, kind, until_s), channel
        except NodeError:
            return None

    def _take(self, keys: Sequence[bytes]) -> Channel | None:
        """Return an idle connection, and enter the partition of some keys that is open on it.

        None if there is none; it is opened then. Raises ``NodeError`` while the node is left alone.
        """
        scope = self._namespace()
        if not scope or not keys:
            return None
        facts = PartitionFacts(scope, self._block_bytes, len(keys[0]), self._group_bytes)
        channel = self._client.take_idle()
        if channel is not None and channel.has_partition(facts):
            self._enter(facts, channel.partition(facts, 0.0))
            return channel
        if channel is not None:
            self._client.keep(channel)
        self._open(facts)
        return None

    def _notify(self, notice: protocol.PartitionNotice) -> Channel | None:
        """Send a notice on the partition, whose number is set here; return its connection.

        None if it is sent later or never.
        """
        partition = self._partition
        notice.partition = partition.number
        return self._client.tell(partition.instance, notice) if partition.instance else None

    def _enter(self, facts: PartitionFacts, partition: OpenedPartition) -> None:
        """Forget all leases if they are of another partition, or of a memory that is gone."""
        instance = partition.mapped.instance
        if (self._partition.facts, self._partition.instance) != (facts, instance):
            self.end_copies()
            describes = partition.mapped.describes
            self._partition = _Partition(facts, instance, partition.number, describes)

    def _open(self, facts: PartitionFacts) -> None:
        """Connect and open the partition on a thread of its own: both may take longer than a step.

        The thread uses no other connection, since waiting requests listen to those.
        """
        is_opening = self._opening is not None and self._opening.thread.is_alive()
        if not is_opening and self._client.breaker.is_passable:
            opener = Thread(target=self._open_now, args=(facts,), name="kvtier-node", daemon=True)
            opener.start()
            self._opening = PartitionOpening(opener, time.monotonic() + OPEN_WAIT_S)

    def _open_now(self, facts: PartitionFacts) -> None:
        until_s = time.monotonic() + OPEN_S
        with (
            suppress(NodeError),
            self._client.using(self._client.take(until_s, is_new=True)) as channel,
        ):
            channel.partition(facts, until_s)
            self._storages = list(channel.mapped.storages)


@dataclass(slots=True)
class _Lease:
    """A slot that this engine uses.

    num: leases. num_holds: copies in flight. While there are any, at least one lease is kept.
    """

    slot: Slot
    generation: int
    num: int = 0
    num_holds: int = 0


@dataclass(slots=True)
class _Partition:
    """State of this engine in a partition.

    brought: by key, the tier from which a block was brought for this engine, until its first use.
    seen: blocks that the node need not be asked about.
    describes: whether the node asks for descriptions. described: when each block was described.
    """

    facts: PartitionFacts
    instance: str
    number: int
    describes: bool = False
    leases: dict[bytes, _Lease] = field(default_factory=dict)
    reserved: dict[bytes, _Lease] = field(default_factory=dict)
    brought: dict[bytes, str] = field(default_factory=dict)
    seen: SeenBlocks = field(default_factory=SeenBlocks)
    described: OrderedDict[bytes, float] = field(default_factory=OrderedDict)


class _LookedUp(NamedTuple):
    """A look-up that was not noted by key yet. answer: None if the node was not asked."""

    keys: Sequence[bytes]
    states: Sequence[BlockState]
    answer: protocol.LookupAnswer | None


def _ready(keys: Sequence[bytes], answer: protocol.LookupAnswer) -> Sequence[bytes]:
    """Return the blocks that are in memory."""
    if len(answer.slots) == 8 * len(keys):  # as it usually is
        return keys
    codes = np.frombuffer(answer.places, np.uint8)
    return [keys[at] for at in np.flatnonzero(codes == protocol.MEMORY).tolist()]


@dataclass(frozen=True, slots=True)
class _Read:
    """A read from storage that a request waits for."""

    signal: NodeSignal
    tier: str
    num_bytes: int
    since_s: float
