"""Prefix cache for one engine. Its methods are listed in the order in which a request calls them.

    tokens --labels--> match --> lease --> plan --> transfer --> (the engine computes) --> commit

While a request is queued, its blocks may be prefetched.

One thread owns a cache and calls its methods. Copies run on threads of their own, and ``poll``
notices when they end. A cache failure never fails a request: its blocks are recomputed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from kvtier.cache.assembly import ladder_options, policy_maker
from kvtier.cache.deletion import Deletion, PromptDeletion, PromptPins, used_by_namespace
from kvtier.cache.hint_actions import HintActions, PromptCalls
from kvtier.cache.ladder import Ladder, LadderCallbacks, Prefetch
from kvtier.cache.lease import Lease
from kvtier.cache.lease_metrics import LeaseObserver
from kvtier.cache.token_lookup import begin_lookup
from kvtier.cache.transfer import CopyJob, LayerGate, LocalMover, Transfer
from kvtier.core.config import CacheConfig
from kvtier.core.errors import Closed, ConfigError, TierError, UsageError
from kvtier.core.hints import BlockHint, Hint, HintOutcome, HintResult, waits
from kvtier.core.hot import Numbers
from kvtier.core.keys import keys_along
from kvtier.core.system.process import OwnerProcess
from kvtier.core.types import (
    DEVICE,
    HOST,
    NO_BLOCK,
    BlockId,
    BlockName,
    ClientHints,
    Label,
    LoadPolicy,
    Match,
    PrefetchPolicy,
    Slot,
    WritePolicy,
)
from kvtier.devices import Device, Finding
from kvtier.index import State, make_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from kvtier.observe.block_events import BlockEvents, BlockLog
from kvtier.plan import Costs, Decision, Plan, weigh
from kvtier.plan.decide import Wait, WaitState, is_computed_sooner
from kvtier.tiers import ArenaOptions, DeviceTier, MemoryTier, StorageTier
from kvtier.tiers.remote.warm_start import warm_start_of
from kvtier.tiers.row import lossy_codec, make_tiers

LONG_PROMPT = 1024
"""Blocks from which on a prompt is long. The cache's thread hashes shorter prompts itself, which
takes half a millisecond at most."""


class PromptEstimate(NamedTuple):
    """Decision about a prompt that was not submitted.

    unknown_in: storage tiers that may have more of it, but can't answer without a wait.
    """

    decision: Decision
    unknown_in: Sequence[str]


class Cache:
    """A prefix cache over the engine's device pool and the tiers below it.

    Args:
        config: settings of the tiers and policies.
        device: copies between the tiers in memory.
        pool: the device tier, over memory that the engine owns.
        clock: seconds; for tests.
        storage: storage tiers to use instead of the ones in ``config``. The cache closes them.
        arena: how the host tier allocates its memory.
        events: records the blocks that enter and leave tiers.
        names_codec: whether all namespaces have ``lossy_codec(config)`` in them (see
            ``Namespace.codec``). Without that a lossy codec is refused.

    Attributes:
        on_twins: called by ``commit`` with the lease, the blocks behind its prefix, their slots and
            the lease's own, if some differ: these blocks were on the device already.

    Raises:
        ConfigError: the configuration is not possible.
    """

    on_twins: (
        Callable[[Lease, Sequence[BlockId], Sequence[Slot], Sequence[Slot]], object] | None
    ) = None

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
    ) -> None:
        if not names_codec and (lossy := lossy_codec(config.coding, config.stores)):
            raise ConfigError(
                f"codec: {lossy} changes KV, and only the embedded engine (kvtier serve) names "
                "such KV differently; use codec=lossless"
            )
        self.config = config
        self.group = pool.layout.group
        self.device = device
        self._clock = clock
        self._weighs_costs = config.load_policy is LoadPolicy.AUTO
        self._leases: set[Lease] = set()
        self._loading: OrderedDict[Lease, None] = OrderedDict()  # begun in the order of deadlines
        self._process = OwnerProcess()
        self._closed = False
        make_policy = policy_maker(config.eviction_policy)
        warm = None if storage else warm_start_of(config.stores, config.warm_start)
        self._tiers = make_tiers(config, device, pool, storage, arena)
        self._index = make_index({name: make_policy(name) for name in self._tiers})
        self._mover = mover = LocalMover(self._tiers, device, clock, warm)
        self._archives = True
        self._ladder = Ladder(
            self._index,
            self._tiers,
            mover,
            ladder_options(config, self.group),
            clock=clock,
            metrics=Metrics(),
            callbacks=LadderCallbacks(
                on_change=None if events is None else events.moved,
                may_write=lambda: self._archives,
            ),
        )
        self._observer = LeaseObserver(self._ladder, self.group, events)
        storages = {
            name: tier for name, tier in self._tiers.items() if isinstance(tier, StorageTier)
        }
        self._deletion = PromptDeletion(self._index, self._ladder, mover, storages)
        self.pins = PromptPins(self._index, self.num_slots().get(HOST, 0))
        self._actions = HintActions(
            self._index,
            self._ladder,
            PromptCalls(self._retain, self._known, self.lookup, self._read_ahead),
            HOST if HOST in self._tiers else None,
            self.group.bytes_per_block,
            make_policy(HOST) != LRU,
            clock,
        )

    # -- the life of a request --------------------------------------------------------------------

    def wants_keys(self, labels: Sequence[Label]) -> bool:
        """Whether to call ``Labels.compute_keys`` on the thread that submits the request.

        True for a long prompt, if storage may have blocks that are not known yet. Any thread may
        call this.
        """
        return len(labels) >= LONG_PROMPT and bool(self._ladder.unindexed())

    def lookup(self, namespace: bytes, labels: Sequence[Label]) -> bool:
        """Look up a prompt in storage. Return whether an answer is still worth waiting for.

        A prompt whose look-up is in flight is not looked up again.
        """
        self._must_be_open()
        return begin_lookup(self._ladder, self._index, namespace, labels)

    def prefetch(self, namespace: bytes, labels: Sequence[Label]) -> Prefetch | None:
        """Begin to read a queued request's blocks from storage into host memory.

        These reads let the reads of scheduled requests pass. Pass the result to ``end_prefetch``
        after ``fetch``. Returns None while prefetches hold too much host memory; try again later.
        """
        self._must_be_open()
        patience_s = self.config.load_deadline_s
        if self.config.prefetch_policy is PrefetchPolicy.TIMEOUT:
            patience_s = self.config.prefetch_timeout_s
        self.lookup(namespace, labels)
        match = self._wanted(namespace, labels)
        return self._ladder.prefetch(match, self._clock() + patience_s)

    def _wanted(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Return the blocks that a request for a prompt would load."""
        return self.match(namespace, labels)

    def is_worth_waiting(self, prefetch: Prefetch) -> bool:
        """Whether the prefetch policy lets the request wait for its prefetch any longer."""
        if self.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return False
        return Wait(prefetch.deadline, [prefetch]).state(self._clock()) is not WaitState.OVER

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """End the prefetch of a request that was scheduled or aborted.

        Reads that have not begun are cancelled, unless another request waits for them.
        """
        self._ladder.end_prefetch(prefetch)
        self._check()

    def fetch(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        num_tokens: int,
        num_blocks: int,
        grain_blocks: int = 1,
        load: bool = True,
        from_both_ends: bool = False,
    ) -> Lease | None:
        """Reuse the cached prefix of a prompt, and reserve slots for the rest.

        Args:
            namespace: digest of everything else that decides on the bytes of a block.
            labels: the prompt's full blocks.
            num_tokens: length of the prompt.
            num_blocks: blocks that the request needs in all, including its output.
            grain_blocks: reuse a multiple of this number of blocks.
            load: if False, reuse only blocks that are on the device already.
            from_both_ends: whether the engine can call ``claim`` while the prefix is loaded.

        Returns:
            A lease, to be used once it is ``ready``. None if the device tier has no room for the
            request now; ``poll``, and call again.

        Raises:
            UsageError: the numbers contradict each other.
        """
        self._must_be_open()
        self._check_request(labels, num_tokens, num_blocks, grain_blocks)
        self.lookup(namespace, labels)
        match = self.match(namespace, labels)
        lease = self.lease(namespace, labels, match)
        decision = self.decide(match, num_tokens, grain_blocks, load, None, from_both_ends)
        plan = decision.plan
        lease.decision = decision
        if not self.transfer(lease, plan, num_blocks):
            self.release(lease)
            return None
        self._observer.found(lease, match)
        if load:
            self._ladder.fetch_ahead(match, plan.num_reused_blocks)
        return lease

    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Return the longest cached prefix, with the fastest tier of each block.

        Changes nothing.
        """
        match = self._index.match(namespace, labels)
        if self._ladder.lost:  # deleted, and still in use
            return match.first(self._deletion.num_kept(match.blocks))
        return match

    def lease(self, namespace: bytes, labels: Sequence[Label], match: Match) -> Lease:
        """Return a lease that keeps the matched blocks from being evicted from their tiers."""
        lease = Lease(self._index, namespace, labels[:], match, self._clock())
        self._leases.add(lease)
        return lease

    def plan(self, match: Match, num_tokens: int, grain_blocks: int = 1, load: bool = True) -> Plan:
        """Plan how many blocks of a match to reuse, by the current costs of load and recompute."""
        return self.decide(match, num_tokens, grain_blocks, load).plan

    def decide(
        self,
        match: Match,
        num_tokens: int,
        grain_blocks: int = 1,
        load: bool = True,
        costs: Costs | None = None,
        from_both_ends: bool = False,
    ) -> Decision:
        """Return the plan together with its inputs, for ``kvtier.plan.explain``.

        costs: by default the current ones, by which every load is free if the policy is ``always``.
        from_both_ends: see ``fetch``.
        """
        size, num_bytes = self.group.block_size, self.group.bytes_per_block
        match = match if load else match.on_device()
        return weigh(
            match,
            costs or self._ladder.cost_snapshot(is_free=not self._weighs_costs),
            num_tokens=num_tokens,
            block_size=size,
            bytes_per_block=num_bytes,
            num_free_slots=self.num_available_slots,
            num_staging_slots=self._ladder.num_staging,
            grain_blocks=grain_blocks,
            deadline_s=self.config.load_deadline_s,
            is_weighed=self._weighs_costs,
            from_both_ends=from_both_ends,
        )

    def transfer(self, lease: Lease, plan: Plan, num_blocks: int) -> bool:
        """Reserve slots for the whole request, and start the plan's copies.

        The slots are consecutive if possible. Returns False, and starts nothing, if the device tier
        has no room.
        """
        lease.cut(plan.num_reused_blocks)
        num_here = lease.num_shared - plan.num_copied_blocks
        new_slots = self._ladder.allocate(num_blocks - num_here)
        if new_slots is None:
            return False
        self._observer.planned(lease, plan)
        self._index.on_request(lease.namespace, lease.labels, self._clock())
        self._actions.on_request(lease.namespace, lease.labels)
        for copy in plan.copies:
            slots, new_slots = new_slots[: len(copy.blocks)], new_slots[len(copy.blocks) :]
            self._ladder.load(copy, slots)
        shared = self._index.slots(lease.blocks, DEVICE)
        lease.slots = Numbers.joined(shared, new_slots)
        self._ladder.wait_for(lease, shared)
        if plan.from_both_ends:
            lease.load_from_end()
        lease.deadline = self._clock() + self.config.load_deadline_s
        self._loading[lease] = None
        self._use(lease, first=0)
        return True

    def follow(self, lease: Lease) -> LayerGate | None:
        """Return a gate by which compute may start before the lease is ready, layer by layer.

        The gate opens each layer when that layer's KV has arrived. The results are valid only once
        the lease is ready and not broken.

        Returns None if no copy to the device has begun, or if one still waits for storage.
        """
        begun = [each.job for each in lease.waiting_for if isinstance(each.job, CopyJob)]
        if not begun or len(begun) < len(lease.waiting_for):
            return None
        return LayerGate(begun, lease.deadline - self._clock())

    @contextmanager
    def claim(self, lease: Lease, num_blocks: int) -> Iterator[range]:
        """Yield the first chunk of blocks that have not arrived, for the engine to compute now.

        Their loads are cancelled. What the engine writes to their slots arrives like a load, for
        every lease that waits for it; if the engine raises, nothing has arrived. The cache must not
        be polled meanwhile.

        Yields an empty range if the chunk is in flight, partly there, or loaded sooner than
        computed. Only a lease that is loaded from its end has other chunks; see ``Plan``.

        num_blocks: blocks per chunk.
        """
        transfers, coming = lease.next_chunk(num_blocks)
        chunk = coming[:num_blocks]
        if not transfers or not self._is_worth_computing(transfers, coming, chunk):
            yield range(0)
            return
        self._observer.computes(lease, chunk)
        try:
            yield chunk
        except BaseException as raised:
            error = TierError(DEVICE, "load", f"its computation failed: {raised!r}")
            self._ladder.end_claimed(transfers, error)
            raise
        self._ladder.end_claimed(transfers)
        self._check()

    def _is_worth_computing(
        self, transfers: Sequence[Transfer], coming: range, chunk: range
    ) -> bool:
        """Whether the chunk is computed before its load would end, and can be claimed."""
        size, num_chunks = self.group.block_size, len(coming) / len(chunk)
        compute_s = self._ladder.costs.expected_prefill_s(chunk.start * size, chunk.stop * size)
        load_s = self._ladder.step_s(transfers) * num_chunks
        return is_computed_sooner(compute_s, load_s) and self._ladder.claim(transfers)

    def commit(self, lease: Lease, num_blocks: int) -> None:
        """Add the lease's blocks up to ``num_blocks``, which the engine has computed, to the cache.

        The lease must be ready. If another request has committed the same block meanwhile, that one
        is shared, and the slot of the duplicate is freed. The write policy decides what is stored.

        Args:
            lease: lease of the request.
            num_blocks: full blocks, counted from the start of the prompt.

        Raises:
            UsageError: the lease has fewer blocks, was released, is broken, or is not ready.
        """
        self._must_be_open()
        self._check_commit(lease, num_blocks)
        if lease.is_private or self._ladder.lost:
            lease.is_private |= self._has_lost(lease, num_blocks)
            if lease.is_private:
                return
        first, labels = lease.num_shared, lease.labels[lease.num_shared : num_blocks]
        above = lease.blocks[-1] if lease.blocks else None
        ours = lease.slots[first : first + len(labels)]
        made = self._index.insert(
            lease.namespace, labels, DEVICE, ours, self._clock(), above, hold=True
        )
        if not made.blocks:
            return  # another transfer is filling these blocks; ours stay private
        self._index.learn_keys(lease.namespace, labels, made.blocks)
        lease.put(first, made.slots)
        twins = [slot for slot, used in zip(ours, made.slots, strict=False) if slot != used]
        if twins and self.on_twins is not None:
            self.on_twins(lease, made.blocks, made.slots, ours)
        self._ladder.free(twins)
        lease.append(made.blocks, DEVICE)
        self._observer.computed(lease, len(made.blocks))
        self._use(lease, first)

    def state_slots(self, lease: Lease, num_blocks: int) -> Sequence[Slot] | None:
        """Return the device slots of the state after some of the lease's blocks.

        They are empty where compute needs none. None if it is not on the device. Valid until the
        next call.
        """
        return ()

    @contextmanager
    def scratch(self, num_blocks: int) -> Iterator[Sequence[Slot] | None]:
        """Yield device slots for a computation that is not cached. None if there is no room.

        Nothing that makes room may be called within.
        """
        slots = self._ladder.allocate(num_blocks, as_neighbours=False)
        try:
            yield slots
        finally:
            self._ladder.free(slots or ())

    def release(self, lease: Lease, record: bool = True) -> None:
        """End the lease: its shared blocks may be evicted, and its other slots are freed.

        Safe to call twice.

        record: False if the request continues with another lease, which is counted instead.
        """
        if lease.released:
            return
        self._must_be_ours(lease)
        lease.num_ended, lease.released = lease.num_shared, True
        self._leases.discard(lease)
        self._loading.pop(lease, None)
        lease.forget_transfers()
        was_used = bool(lease.slots)
        if was_used and not self._closed and not lease.is_private:
            self._store(lease)
            self._ladder.enqueue_write(lease.blocks)
        self._ladder.free(lease.reserved_slots)
        lease.slots = []
        lease.cut(0)
        self._ladder.drop_lost()
        if was_used and record:
            self._observer.ended(lease)
        self._check()

    def _must_be_open(self) -> None:
        if self._closed:
            raise Closed("the cache is closed; make a new one")
        self._process.must_be_here("the cache")

    def _must_be_ours(self, lease: Lease) -> None:
        if lease not in self._leases:
            state = "was released" if lease.released else "belongs to another cache"
            raise UsageError(f"the lease {state}; fetch the prompt again")

    def _check_request(
        self, labels: Sequence[Label], num_tokens: int, num_blocks: int, grain_blocks: int
    ) -> None:
        size = self.group.block_size
        if num_tokens < len(labels) * size:
            raise UsageError(
                f"num_tokens={num_tokens} is less than the {len(labels)} labels stand for, at "
                f"block_size={size}; give the prompt's length, and labels of its full blocks only"
            )
        if num_blocks * size < num_tokens:
            raise UsageError(
                f"num_blocks={num_blocks} holds {max(num_blocks, 0) * size} tokens, the prompt has "
                f"{num_tokens}; give at least {-(-num_tokens // size)}"
            )
        if grain_blocks < 1:
            raise UsageError(f"grain_blocks={grain_blocks} is below 1")

    def _check_commit(self, lease: Lease, num_blocks: int) -> None:
        self._must_be_ours(lease)
        if lease.broken:
            raise UsageError("a load of the lease failed; release it and fetch the prompt again")
        if not lease.ready:
            raise UsageError("the lease is not ready; poll until it is, then commit")
        limit = min(len(lease.labels), len(lease.slots))
        if not 0 <= num_blocks <= limit:
            raise UsageError(
                f"commit of num_blocks={num_blocks}: the lease has {limit} full blocks; give a "
                f"number from 0 to {limit}"
            )

    def _use(self, lease: Lease, first: int) -> None:
        """Note a use of the lease's blocks from ``first`` on, and store full batches."""
        self._index.touch(lease.blocks[first:], self._clock())
        num_waiting = lease.num_shared - lease.num_stored
        if (
            not lease.is_private
            and num_waiting * self.group.bytes_per_block >= self.config.store_batch_bytes
        ):
            self._store(lease)
        self._check()

    def _store(self, lease: Lease) -> None:
        """Copy missing blocks one tier down, according to the write policy."""
        wanted = lease.blocks
        if self.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            uses = zip(wanted, self._index.num_uses(wanted), strict=True)
            wanted = [block for block, num in uses if num >= self.config.store_after_uses]
        if self.config.write_policy is not WritePolicy.WRITE_BACK and not lease.is_left_out:
            stored = self._ladder.store(wanted, lease.num_stored, lease.stores)
            lease.num_stored, lease.is_left_out = stored

    # -- hints ------------------------------------------------------------------------------------

    def hint(self, namespace: bytes, labels: Sequence[Label], hint: Hint) -> Sequence[HintResult]:
        """Apply a client's hint to the blocks of a prompt. Return the result of each action.

        The hint applies from now on, to blocks in the tiers below the device and to blocks that
        ``fetch`` has requested. LRU tiers ignore priorities; with ``client_hints="off"`` nothing is
        done. Prefetches and demotions apply to blocks that no request uses.

        labels: all full blocks of the prompt.
        """
        self._must_be_open()
        if self.config.client_hints is ClientHints.OFF:
            return hint.declined(HintOutcome.OFF)
        statements = hint.block_hint(self.group.block_size, self._clock())
        return [self._actions.apply(namespace, labels[:], stated) for stated in statements]

    def _retain(self, namespace: bytes, labels: Sequence[Label], stated: BlockHint) -> None:
        self._index.retain(namespace, labels, stated, self._clock())

    def _read_ahead(self, blocks: Sequence[BlockId], storage: str) -> int:
        num = min(len(blocks), self._ladder.num_available(HOST))
        self._ladder.promote(blocks[:num], storage, urgent=False)
        return num

    def _known(self, namespace: bytes, labels: Sequence[Label]) -> Sequence[BlockId]:
        return self._wanted(namespace, labels).blocks

    def wait(self, namespace: bytes, labels: Sequence[Label], is_waiting: bool) -> None:
        """Note that a request has been queued (True), or is queued no longer (False).

        Call it once with each value per request. In between, blocks of the prompt are evicted only
        if nothing else can be. Cost: O(blocks of the prompt).
        """
        now = self._clock()
        self._index.retain(namespace, labels, waits(is_waiting, now), now)

    # -- prompts that were not submitted -----------------------------------------------------------

    def estimate(
        self, namespace: bytes, labels: Sequence[Label], num_tokens: int, grain_blocks: int = 1
    ) -> PromptEstimate:
        """Return the decision that ``fetch`` would make now, with measured seconds.

        Changes nothing: no use is recorded. Blocks that only storage knows are counted if it can
        answer without a wait, but not adopted. Arguments: see ``fetch``.
        """
        match, unknown_in = self._match_with_unindexed(namespace, labels)
        costs = self._ladder.cost_snapshot()
        decision = self.decide(match, num_tokens, grain_blocks, costs=costs)
        if not self._weighs_costs and decision.plan.compared:  # all that is found is loaded
            last = decision.plan.compared[-1]
            load_s, recompute_s = last.load_s, last.recompute_s
            plan = Plan((), last.num_blocks, load_s, recompute_s)
            decision = replace(decision, plan=plan, is_weighed=True)
        return PromptEstimate(decision, unknown_in)

    def _match_with_unindexed(
        self, namespace: bytes, labels: Sequence[Label]
    ) -> tuple[Match, Sequence[str]]:
        """Return the cached prefix with its blocks in storage that the index does not know.

        The second value is the storage tiers that may have more.
        """
        match, unknown_in = self.match(namespace, labels), list[str]()
        num_asked = len(labels) - match.num_blocks
        storages = self._ladder.unindexed() if num_asked else ()
        if storages:
            before = self._index.key(match.blocks[-1]) if match.blocks else namespace
            keys = keys_along(namespace, labels, match.num_blocks, num_asked, before)
        for storage in storages:
            num = self._mover.num_known(storage, keys)
            if num is None:
                unknown_in.append(storage)
                continue
            match = Match(
                [*match.blocks, *[NO_BLOCK] * num],
                match.tiers + (storage,) * num,
                match.in_flight + (False,) * num,
                match.num_asked,
            )
            keys = keys[num:]
        return match, unknown_in if match.num_blocks < len(labels) else ()

    # -- deletion and control ---------------------------------------------------------------------

    def delete(self, namespace: bytes, labels: Sequence[Label]) -> Deletion:
        """Delete a prompt's blocks from every tier. They are not found from now on.

        Requests in flight with the same beginning continue, and store nothing. ``is_deleted``
        returns whether every tier has confirmed the deletion.
        """
        deletion = self._deletion.delete(namespace, labels)
        for lease in self._leases:
            if lease.namespace == namespace and lease.labels[:1] == labels[:1]:
                lease.is_private = True
        return self._deleting(deletion)

    def delete_all(self, is_meant: Callable[[bytes], bool]) -> Deletion:
        """Delete all blocks of the namespaces for which ``is_meant`` is true, from every tier.

        Blocks that a disk keeps from an earlier process are deleted, too, unless a known block of
        another namespace is the same. Cost: O(all blocks).
        """
        deletion = self._deletion.delete_all(is_meant)
        for lease in self._leases:
            lease.is_private |= is_meant(lease.namespace)
        return self._deleting(deletion)

    def _deleting(self, deletion: Deletion) -> Deletion:
        self.pins.forget(deletion.blocks)
        self._ladder.drop_lost()
        self._check()
        return deletion

    def _has_lost(self, lease: Lease, num_blocks: int) -> bool:
        """Whether the place of one of the lease's blocks is taken by one that is being deleted."""
        labels = lease.labels[:num_blocks]
        num = len(self._index.states(lease.namespace, labels, DEVICE))
        known = self._index.extend(lease.namespace, labels[:num])
        return self._deletion.num_kept(known) < num

    def is_deleted(self, deletion: Deletion) -> bool:
        """Whether no tier has any of the blocks any more, and storage has confirmed it."""
        return self._deletion.is_complete(deletion)

    def locate(self, namespace: bytes, labels: Sequence[Label]) -> list[str]:
        """Return where each block of a prompt is: memory, arriving, storage or nowhere."""
        found = ["nowhere"] * len(labels)
        slowest_first = reversed(list(self._tiers))
        columns = {tier: self._index.states(namespace, labels, tier) for tier in slowest_first}
        for tier, states in columns.items():
            is_storage = isinstance(self._tiers[tier], StorageTier)
            for at, state in enumerate(states):
                if state is State.READY:
                    found[at] = "storage" if is_storage else "memory"
                elif state is State.WRITING and not is_storage and found[at] != "memory":
                    found[at] = "arriving"
        if self._ladder.lost:
            num = max(map(len, columns.values()))
            kept = self._deletion.num_kept(self._index.extend(namespace, labels[:num]))
            found[kept:] = ["nowhere"] * (len(found) - kept)
        return found

    def places(
        self, tier: str, namespace: bytes, labels: Sequence[Label]
    ) -> tuple[MemoryTier | StorageTier, list[Slot] | list[BlockName]]:
        """Return a tier, and where the blocks of a prompt lie in it: slots, or names in storage.

        For negative controls, which read and overwrite stored bytes. Valid until the next call.
        """
        blocks = self.match(namespace, labels).blocks
        held = [block for block in blocks if self._index.state(block, tier) is State.READY]
        if isinstance(self._tiers[tier], StorageTier):
            return self._tiers[tier], list(self._index.names(held))
        return self._tiers[tier], list(self._index.slots(held, tier))

    def stored(self, namespace: bytes, labels: Sequence[Label]) -> tuple[int, bool]:
        """Return how many of a prompt's first blocks a storage tier has acknowledged.

        The second value is whether the next block is on its way there.
        """
        storages = self._ladder.storages
        columns = [self._index.states(namespace, labels, tier) for tier in storages]
        known = list(zip(*columns, strict=True))
        num = next((at for at, each in enumerate(known) if State.READY not in each), len(known))
        blocks = self._index.extend(namespace, labels[: min(num + 1, len(known))])
        kept = self._deletion.num_kept(blocks)
        if kept <= num or not self._ladder.is_busy:
            return min(kept, num), False
        block, (_, *below) = blocks[num], self._tiers
        moves = any(self._index.state(block, tier) is State.WRITING for tier in below)
        return num, moves or self._ladder.are_queued([block])[0]

    def pin(self, namespace: bytes, labels: Sequence[Label], seconds: float) -> tuple[int, int]:
        """Keep a prompt's first blocks in host memory for a time; see ``PromptPins.add``."""
        num = len(self._index.states(namespace, labels, HOST))
        blocks = self._index.extend(namespace, labels[:num])
        kept = self._deletion.num_kept(blocks)
        return self.pins.add(blocks[:kept], self._clock() + seconds)

    def shared_storages(self) -> list[str]:
        """Return the names of storage tiers that other processes use, too."""
        stores = (tier for tier in self._tiers.values() if isinstance(tier, StorageTier))
        return [tier.name for tier in stores if tier.facts.is_shared]

    def used_by_namespace(self) -> dict[bytes, dict[str, int]]:
        """Return the bytes in each tier by namespace. Cost: O(all blocks)."""
        used = used_by_namespace(self._index, list(self._tiers))
        size = self.group.bytes_per_block
        return {
            namespace: {tier: num * size for tier, num in tiers.items()}
            for namespace, tiers in used.items()
        }

    # -- between the steps of the engine ----------------------------------------------------------

    def poll(self) -> None:
        """Notice finished copies, and give up late loads. Never waits.

        Blocks that arrived become ready; those of a failed copy become absent.
        """
        finished = self._ladder.poll()
        self.pins.expire(self._clock())
        self._actions.poll()
        self._give_up_late_loads(self._clock())
        if finished:
            self._check()

    def _give_up_late_loads(self, now: float) -> None:
        """Give up loads past their deadline. ``_loading`` is ordered by deadline."""
        while self._loading:
            lease = next(iter(self._loading))
            if not lease.ready and now <= lease.deadline:
                return
            del self._loading[lease]
            if not lease.ready:
                self._observer.late(lease, now - lease.started)
                lease.give_up(late=True)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait for all copies in flight, and ``poll``. Return False if ``timeout_s`` has passed."""
        return self._ladder.drain(timeout_s, self.poll)

    @property
    def is_busy(self) -> bool:
        """Whether copies are in flight, or writes to storage are due."""
        return self._ladder.is_busy

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Report to the planner that a piece of prefill took ``seconds``.

        Args:
            num_before: tokens in front of the piece.
            num_tokens: tokens of the piece.
            seconds: its duration.
        """
        self._ladder.costs.observe_prefill(num_before, num_tokens, seconds)

    # -- upkeep -----------------------------------------------------------------------------------

    @property
    def num_available_slots(self) -> int:
        """Device slots that are free or could be freed by eviction. An upper bound."""
        return self._ladder.num_available(DEVICE)

    @property
    def metrics(self) -> Metrics:
        """Metrics of the cache. Gauges are as of the last ``update_metrics``."""
        return self._ladder.metrics

    def update_metrics(self) -> Metrics:
        """Update the gauges, and return the metrics."""
        self._ladder.update_metrics()
        return self.metrics

    def used_slots(self) -> dict[str, int]:
        """Return the number of slots in use per tier."""
        return {name: slots.num_used for name, slots in self._ladder.usage().items()}

    def num_slots(self) -> dict[str, int]:
        """Return the number of slots per tier."""
        return {name: slots.num_slots for name, slots in self._ladder.usage().items()}

    def let_archive(self, is_on: bool) -> None:
        """Enable or disable writes to storage.

        Disable them while the namespace of new blocks is uncertain. When they are enabled again,
        queued blocks that are still in memory are written.
        """
        self._archives = is_on

    def clear(self, tier: str = DEVICE) -> None:
        """Evict every block that no lease holds from ``tier``."""
        self._ladder.evict(tier, self._index.num_held(tier))
        self._check()

    def block_events(self, chunk_blocks: int = 1) -> BlockEvents:
        """Return a converter of the records in ``events`` to KV events; see ``BlockEvents``."""
        stores = [tier for tier in self._tiers.values() if isinstance(tier, StorageTier)]
        shared = [tier.name for tier in stores if tier.facts.is_shared]
        return BlockEvents(list(self._tiers), shared, self.group.block_size, chunk_blocks)

    def findings(self) -> list[Finding]:
        """Return what is in use, for ``kvtier doctor``."""
        index = Finding("index", self._index.describe())
        lines = (line for tier in self._tiers.values() for line in tier.findings())
        return [*self.device.findings(), index, *lines]

    def close(self) -> None:
        """Finish the copies in flight, and close the tiers.

        Safe to call twice. In a forked child it does nothing, since the tiers are the parent's.
        """
        if not self._closed:
            self._closed = True
            in_use = self._ladder.close() if self._process.is_here else self._tiers.keys()
            for name, tier in self._tiers.items():
                if name not in in_use:
                    tier.close()

    def _check(self) -> None:
        if self.config.strict:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raise AssertionError if slots, leases and blocks don't add up. Cost: O(all blocks)."""
        self._ladder.check_invariants(sum(len(lease.reserved_slots) for lease in self._leases))
