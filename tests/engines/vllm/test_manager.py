"""The scheduler's side, called as vLLM's scheduler calls it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.cache.block_cache import BlockState
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import (
    Done,
    Hello,
    RankMover,
    RankOrder,
    RecoveredBlocks,
    Report,
    Verb,
)
from kvtier.connectors.vllm.offloading.manager import OffloadedTiers
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.key_scope import KeyScope
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.new_weights import NEW_WEIGHTS
from kvtier.connectors.vllm.shared.prompt import Shape, group_bytes
from kvtier.connectors.vllm.shared.reach import Cuts
from kvtier.connectors.vllm.shared.request_state import Advice, Phase
from kvtier.connectors.vllm.shared.tiers import rank_tiers
from kvtier.core.types import DEVICE, DISK, HOST, CacheMode, Direct, LoadPolicy
from kvtier.observe.specs import VLLM_LOADED_CHUNKS
from kvtier.tiers.disk import DiskTier

STEP = 128
BLOCK_BYTES = 1 << 20
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(12)]


class Known(VllmNames):
    """Block names with a known digest of the weights."""

    digest = b"n" * 32


class Scheduler:
    """Calls the manager as vLLM's scheduler does, and reports as one rank would."""

    def __init__(
        self,
        num_host: int = 4,
        policy: LoadPolicy = LoadPolicy.ALWAYS,
        num_disk: int = 8,
        direct: Direct = Direct.OFF,
        block_sizes: tuple[int, ...] = (STEP,),
        follows_hints: bool = True,
        mode: CacheMode = CacheMode.BOTH,
    ) -> None:
        names = Known(None, BLOCK_BYTES, "vllm")
        facts = {DISK: replace(DiskTier.facts, direct=direct)}
        mover = RankMover(facts, BLOCK_BYTES, 1, 1, device=DEVICE)
        shape = Shape(block_sizes, BLOCK_BYTES, num_shards=2)
        tiers = rank_tiers(mover, {HOST: num_host, DISK: num_disk}, names, shape)
        self.manager = OffloadedTiers(tiers, mover, names, shape, policy, True, follows_hints, mode)
        assert isinstance(tiers.cache, LocalBlockCache)
        self.ladder = tiers.cache.ladder
        self.costs = self.ladder._transfers._costs
        hello = Hello(num_host, {DISK: RecoveredBlocks()}, frozenset({DISK}))
        self.manager.hear(Report(hellos={0: hello}))

    def request(self, name: str, keys: list[OffloadKey], **changes: object) -> ReqContext:
        context = ReqContext(name, **changes)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * STEP)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, keys: list[OffloadKey]) -> None:
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(set(output.keys_to_store), context)

    def carry_out(self, *gone: int, failed: Sequence[int] = (), seconds: float = 0.1) -> None:
        while orders := self.manager.take_orders():
            for order in orders:
                num = len(order.names)
                lost = frozenset([*gone, *failed])
                done = Done(lost, frozenset(gone), 0, 1, num * BLOCK_BYTES, seconds * num)
                self.manager.hear(Report(done={order.order_id: done}))

    def reads(self) -> list[RankOrder]:
        """Return the blocks that ranks are to read next."""
        return [order for order in self.manager.take_orders() if order.verb is Verb.READ]

    def computes_at_once(self) -> None:
        """Report a step that was so fast that no wait is worthwhile."""
        step = self.manager.steps.begin(0.0, [(0, 1000)])
        assert step is not None
        self.manager.steps.end(step, 1e-6)

    def disk_is_slow(self) -> None:
        """Report a step, and a read that took longer than computing its blocks."""
        step = self.manager.steps.begin(0.0, [(0, 1000)])
        assert step is not None
        self.manager.steps.end(step, 0.1)
        self.costs.observe_copy((DISK, HOST), 4 * BLOCK_BYTES, 10.0)

    def look_up(self, context: ReqContext, keys: list[OffloadKey]) -> list[LookupResult]:
        self.manager.state_of(context.req_id).begin_look_up(0)
        return [self.manager.lookup(key, context) for key in keys]

    def load(self, keys: Sequence[OffloadKey], context: ReqContext) -> BlockSlots:
        """Begin a load of blocks that a look-up has found last."""
        if self.manager.state_of(context.req_id).phase is not Phase.LOOKING_UP:
            self.look_up(context, list(keys))
        return self.manager.prepare_load(keys, context).blocks

    def advise(self, name: str) -> Advice:
        """Return the advice for a request with a prompt of three blocks."""
        return self.manager.promotion.advise(self.manager.state_of(name), 0, 3 * STEP)

    def waits(self, name: str, keys: list[OffloadKey]) -> ReqContext:
        """Begin a request that waits for its blocks on disk."""
        context = self.request(name, keys)
        self.look_up(context, keys)
        assert self.advise(name) is Advice.WAIT
        return context

    def serve(self, name: str, keys: list[OffloadKey], **changes: object) -> None:
        """Store a request's blocks, and finish it."""
        context = self.request(name, keys, **changes)
        self.store(context, keys)
        self.manager.on_request_finished(context)

    def num_worth_loading(self, name: str) -> int:
        """Return how many tokens of two blocks of such a prompt are worth loading."""
        state = self.manager.state_of(name)
        return self.manager.promotion.num_worth_loading(state, 0, 2 * STEP, 3 * STEP)

    def to_disk(self, keys: list[OffloadKey], num_others: int = 4) -> None:
        """Store blocks, and evict them from host memory by others."""
        for key in keys:
            self.store(self.request("first", keys), [key])
            self.carry_out()
        others = [make_offload_key(bytes([at]) * 32, 1) for at in range(num_others)]
        context = self.request("others", others)
        self.store(context, others)
        self.carry_out()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.mark.parametrize("mode", CacheMode)
def test_an_engine_stores_and_loads_what_its_mode_says(mode: CacheMode) -> None:
    scheduler = Scheduler(mode=mode)
    scheduler.serve("first", KEYS[:2])
    num_used = scheduler.manager.cache.usage()[HOST].num_used
    assert num_used == (2 if mode.stores else 0)
    state = scheduler.manager.state_of(scheduler.request("again", KEYS[:2]).req_id)
    found = scheduler.manager.num_to_load(state, 0, 3 * STEP, lambda: 2 * STEP)
    assert found == (2 * STEP if mode.loads else 0)


def test_write_that_hangs_is_not_waited_for(scheduler: Scheduler) -> None:
    """vLLM takes steps as long as work is pending."""
    scheduler.store(scheduler.request("first", KEYS[:1]), KEYS[:1])
    (order,) = scheduler.manager.take_orders()
    assert scheduler.manager.has_pending_work()
    late = Done(num_ranks=0, is_late=True)
    scheduler.manager.hear(Report(done={order.order_id: late}))
    assert not scheduler.manager.has_pending_work()
    scheduler.store(scheduler.request("second", KEYS[1:2]), KEYS[1:2])
    assert scheduler.manager.take_orders() == [], "the disk is left alone"
    assert not scheduler.manager.has_pending_work()
    scheduler.manager.hear(Report(done={order.order_id: Done(num_bytes=BLOCK_BYTES)}))
    scheduler.store(scheduler.request("third", KEYS[2:3]), KEYS[2:3])
    (order,) = scheduler.manager.take_orders()
    assert order.verb is Verb.WRITE
    assert scheduler.manager.has_pending_work()


def test_block_on_disk_is_asked_for_once_and_then_in_host_memory(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.request("again", KEYS[:3])
    retry = [LookupResult.RETRY] * 2 + [LookupResult.MISS]
    assert scheduler.look_up(request, KEYS[:3]) == retry
    assert scheduler.advise("again") is Advice.WAIT
    pending = [LookupResult.HIT_PENDING] * 2 + [LookupResult.MISS]
    assert scheduler.look_up(request, KEYS[:3]) == pending
    assert scheduler.manager.has_pending_work()
    scheduler.carry_out()
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT] * 2
    assert scheduler.manager.get_load_source(KEYS[0], request) is CacheHitSource.DISK
    assert scheduler.num_worth_loading("again") == 2 * STEP
    scheduler.load(KEYS[:2], request)
    scheduler.manager.complete_load(KEYS[:2], request)
    assert scheduler.manager.get_load_source(KEYS[0], request) is CacheHitSource.HOST


def test_two_requests_share_what_is_on_its_way(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    for name in ("one", "other"):
        scheduler.waits(name, KEYS[:2])
    assert len(scheduler.reads()) == 1


def test_request_waits_no_longer_than_computing_takes(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    scheduler.computes_at_once()
    request = scheduler.request("hasty", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    advice = [scheduler.advise("hasty") for _ in range(2)]
    assert Advice.LOOK_AGAIN in advice
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.MISS] * 2
    assert scheduler.advise("hasty") is Advice.COMPUTE


def test_blocks_that_take_longer_than_computing_are_left_on_disk() -> None:
    scheduler = Scheduler(policy=LoadPolicy.AUTO)
    scheduler.to_disk(KEYS[:2])
    scheduler.disk_is_slow()
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.advise("again") is Advice.LOOK_AGAIN
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.MISS] * 2
    (probe,) = scheduler.reads()
    assert not probe.urgent, "no request waits for it"


def test_log_has_once_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvtier.connectors.vllm.shared.promotion")
    scheduler = Scheduler(policy=LoadPolicy.AUTO)
    name = "again\nforged"
    scheduler.store(scheduler.request("first", KEYS[:2]), KEYS[:2])
    scheduler.look_up(scheduler.request(name, KEYS[:2]), KEYS[:2])
    for _ in range(3):  # vLLM looks up in every step, until there is room for it
        scheduler.num_worth_loading(name)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(r"prompt request=again\nforged tokens=384 reused=256 host_tokens=256 ")


def test_damaged_block_is_a_miss(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.waits("again", KEYS[:2])
    scheduler.carry_out(1)
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT, LookupResult.MISS]


def test_block_whose_read_failed_is_computed_and_stays_on_disk(scheduler: Scheduler) -> None:
    """The request that waited for it does not wait for another read; another request may."""
    scheduler.to_disk(KEYS[:2])
    request = scheduler.waits("again", KEYS[:2])
    scheduler.carry_out(failed=[1])
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT, LookupResult.RETRY]
    assert scheduler.advise("again") is Advice.LOOK_AGAIN
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT, LookupResult.MISS]
    assert not scheduler.reads()
    scheduler.waits("later", KEYS[:2])
    assert len(scheduler.reads()) == 1


def test_block_that_is_computed_although_it_was_found_is_counted_once() -> None:
    scheduler = Scheduler(policy=LoadPolicy.AUTO)
    scheduler.to_disk(KEYS[:2])
    scheduler.disk_is_slow()
    scheduler.store(scheduler.request("again in memory", KEYS[:1]), KEYS[:1])
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.advise("again") is Advice.LOOK_AGAIN
    scheduler.look_up(request, KEYS[:2])
    scheduler.load(KEYS[:1], request)
    scheduler.manager.complete_load(KEYS[:1], request)
    scheduler.manager.on_request_finished(request)
    stats = scheduler.manager.get_stats()
    assert stats is not None
    planned = stats.data["data"]["vllm:kvtier_planned_blocks"]
    assert planned == {("load",): 1, ("recompute",): 1}


def test_copies_to_the_device_are_learnt_together(scheduler: Scheduler) -> None:
    scheduler.manager.observe_loads([2 * BLOCK_BYTES, 8 * BLOCK_BYTES], 10.0)
    costs = scheduler.ladder.cost_snapshot()
    assert costs.copy_s((HOST, DEVICE), BLOCK_BYTES) == pytest.approx(1.0)
    for nothing in ([], [0]):
        scheduler.manager.observe_loads(nothing, 1.0)


def test_blocks_are_counted_by_where_they_came_from(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.waits("again", KEYS[:2])
    scheduler.carry_out()
    scheduler.manager.get_stats()
    for _ in range(2):
        scheduler.load(KEYS[:2], request)
        scheduler.manager.complete_load(KEYS[:2], request)
    counted = scheduler.manager.counts.take()
    loaded = {labels: num for (each, labels), num in counted.items() if each is VLLM_LOADED_CHUNKS}
    assert loaded == {(DISK,): 2, (HOST,): 2}


def test_burst_over_a_slow_disk_leaves_host_memory_to_others_and_nobody_waits() -> None:
    """The disk accepts no write meanwhile."""
    scheduler = Scheduler(num_host=16, num_disk=64)
    scheduler.to_disk(KEYS[:2], num_others=16)
    for number in range(100, 130):
        prompt = [make_offload_key(bytes([number, at]) * 16, 0) for at in range(4)]
        scheduler.serve(f"burst {number}", prompt)
    writes = scheduler.manager.take_orders()
    assert sum(len(write.names) for write in writes if write.verb is Verb.WRITE) == 4, "a quarter"
    assert scheduler.ladder.num_available(HOST) == 12
    request = scheduler.waits("again", KEYS[:2])
    (read,) = scheduler.reads()
    scheduler.manager.hear(Report(done={read.order_id: Done()}))
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT] * 2
    stats = scheduler.manager.get_stats()
    assert stats is not None
    unwritten = stats.data["data"]["vllm:kvtier_not_demoted_chunks"][(DISK,)]
    assert unwritten > 90, "what left host memory before its turn is counted"


def test_vllm_is_told_what_all_engines_tell(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.waits("loads", KEYS[:2])
    scheduler.carry_out()
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT] * 2
    scheduler.load(KEYS[:2], request)
    scheduler.manager.complete_load(KEYS[:2], request)
    stats = scheduler.manager.get_stats()
    assert stats is not None
    told = stats.data["data"]
    assert told["vllm:kvtier_planned_blocks"] == {("load",): 2}
    assert told["vllm:kvtier_saved_tokens"] == {(): 2 * STEP}
    assert told["vllm:kvtier_breaker_state"] == {(DISK,): 0}
    sizes = {(HOST,): 2 * BLOCK_BYTES, (DISK,): 2 * BLOCK_BYTES}
    assert told["vllm:kvtier_slot_bytes"] == sizes, "of both parts of a block"
    assert told.keys() <= KvtierSpec.build_metric_definitions({}).keys(), "vLLM knows them all"


def test_request_loads_only_from_the_tiers_that_it_names(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    scheduler.store(scheduler.request("host", KEYS[1:2]), KEYS[1:2])
    host, disk, store = {"medium": "cpu"}, {"medium": "STORAGE"}, {"locality": "remote"}
    for tiers, found in (
        ([], [LookupResult.MISS] * 2),
        ([store], [LookupResult.MISS] * 2),
        ([host], [LookupResult.MISS, LookupResult.HIT]),
        ([disk], [LookupResult.RETRY, LookupResult.MISS]),
        ([store, host], [LookupResult.MISS, LookupResult.HIT]),
    ):
        params = {"kv_load_tiers": tiers}
        request = scheduler.request("picky", KEYS[:2], kv_transfer_params=params)
        assert scheduler.look_up(request, KEYS[:2]) == found


def test_end_of_a_request_keeps_its_beginning(scheduler: Scheduler) -> None:
    """vLLM's own pool had all of it, so kvtier got no look-up."""
    for key in KEYS[:4]:
        scheduler.store(scheduler.request("first", KEYS[:4]), [key])
    scheduler.manager.on_request_finished(scheduler.request("again", KEYS[:2]))
    scheduler.store(scheduler.request("other", KEYS[4:6]), KEYS[4:6])
    asks = scheduler.request("asks", KEYS[:6])
    found = scheduler.look_up(asks, KEYS[:6])
    assert [at for at, each in enumerate(found) if each is LookupResult.HIT] == [0, 1, 4, 5]


def test_blocks_of_an_adapter_stay_in_memory(scheduler: Scheduler) -> None:
    """Another process may give the same name to another adapter."""
    scheduler.to_disk(KEYS[:1])
    request = scheduler.request("adapted", KEYS[:2])
    scheduler.manager.state_of("adapted").scope = KeyScope(shared=0)
    assert scheduler.look_up(request, KEYS[:1]) == [LookupResult.MISS]
    output = scheduler.manager.prepare_store(KEYS[1:2], request)
    assert output is not None
    scheduler.manager.on_request_finished(request)
    scheduler.manager.complete_store(set(output.keys_to_store), request)
    assert scheduler.manager.take_orders() == []


def test_blocks_that_are_keyed_by_a_name_stay_in_memory(scheduler: Scheduler) -> None:
    """Blocks before an image are written to disk and read from it; later ones are not."""
    scheduler.to_disk(KEYS[:2])
    request = scheduler.request("sees", KEYS[:4])
    scheduler.manager.state_of("sees").scope = KeyScope(shared=STEP + 16)
    found = scheduler.look_up(request, KEYS[:2])
    assert found == [LookupResult.RETRY, LookupResult.MISS]
    scheduler.store(request, KEYS[2:4])
    assert scheduler.manager.take_orders() == []
    assert scheduler.look_up(request, KEYS[2:4]) == [LookupResult.HIT] * 2
    plain = scheduler.request("plain", KEYS[:4])
    assert scheduler.look_up(plain, KEYS[2:4]) == [LookupResult.HIT] * 2


def test_blocks_that_are_not_to_be_kept_are_neither_stored_nor_found(scheduler: Scheduler) -> None:
    scheduler.store(scheduler.request("plain", KEYS[:3]), KEYS[:3])
    request = scheduler.request("sees", KEYS[:4])
    scheduler.manager.state_of("sees").scope = KeyScope(STEP, STEP)
    found = scheduler.look_up(request, KEYS[:3])
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.MISS]
    output = scheduler.manager.prepare_store(KEYS[2:4], request)
    assert output is not None
    assert not list(output.keys_to_store)


def test_store_without_room_is_refused_without_a_line_in_the_log_of_vllm() -> None:
    """vLLM warns of each request and step for which a manager returns None."""
    scheduler = Scheduler(num_host=2)
    first = scheduler.request("first", KEYS[:2])
    scheduler.store(first, KEYS[:2])
    scheduler.load(KEYS[:2], first)
    output = scheduler.manager.prepare_store(KEYS[2:4], scheduler.request("second", KEYS[2:4]))
    assert output is not None
    assert not list(output.keys_to_store)
    scheduler.manager.complete_load(set(KEYS[:2]), first)
    scheduler.carry_out()
    scheduler.store(scheduler.request("third", KEYS[2:4]), KEYS[2:4])
    assert (
        scheduler.look_up(scheduler.request("again", KEYS[2:4]), KEYS[2:4])
        == [LookupResult.HIT] * 2
    )


def test_events_tell_of_both_tiers(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    events = list(scheduler.manager.take_events())
    assert [(event.medium, event.removed) for event in events if KEYS[0] in event.keys] == [
        (Medium.CPU, False),
        (Medium.STORAGE, False),
        (Medium.CPU, True),
    ]
    assert list(scheduler.manager.take_events()) == []


def test_full_disk_of_the_smallest_rank_gives_up_the_oldest_blocks(scheduler: Scheduler) -> None:
    scheduler.manager.hear(Report(hellos={0: Hello(4, num_blocks={DISK: 2})}))
    for at, key in enumerate(KEYS[:3]):
        scheduler.store(scheduler.request(f"request {at}", [key]), [key])
        scheduler.carry_out()
    assert scheduler.manager.cache.usage()[DISK].num_used == 2
    assert scheduler.manager.cache.usage()[DISK].num_open == 2


def test_pause_keeps_the_tiers_and_gives_up_copies_under_way(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    scheduler.store(scheduler.request("second", KEYS[1:2]), KEYS[1:2])
    half = scheduler.request("half", KEYS[2:3])
    assert scheduler.manager.prepare_store(KEYS[2:3], half) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NEW_WEIGHTS, "is_pausing", True)
        scheduler.manager.reset_cache()
    scheduler.manager.cache.check_invariants()
    scheduler.carry_out()
    request = scheduler.request("again", KEYS[:3])
    on_disk, in_memory, half_stored = scheduler.look_up(request, KEYS[:3])
    assert on_disk is not LookupResult.MISS
    assert in_memory is LookupResult.HIT
    assert half_stored is LookupResult.MISS
    scheduler.manager.reset_cache()  # another one, with other weights
    scheduler.carry_out()
    anew = scheduler.request("anew", KEYS[:2])
    assert scheduler.look_up(anew, KEYS[:2]) == [LookupResult.MISS] * 2, "nor on disk"


def two_groups(numbers: Sequence[int]) -> list[OffloadKey]:
    """Return the keys of a prompt, group by group."""
    hashes = [bytes([number]) * 32 for number in numbers]
    return [make_offload_key(hash_value, group) for group in range(2) for hash_value in hashes]


def serve(scheduler: Scheduler, numbers: Sequence[int], answer: Sequence[int] = ()) -> int:
    """Serve a prompt of two groups, and store blocks of its answer; return the number of hits."""
    prompt = two_groups(numbers)
    context = ReqContext("request")
    for at, key in enumerate(prompt):
        context.set_offload_key_position(key, (at % len(numbers) + 1) * STEP)
    scheduler.manager.on_new_request(context)
    found = scheduler.look_up(context, prompt).count(LookupResult.HIT)
    for at, number in enumerate(answer):
        for key in two_groups([number]):
            context.set_offload_key_position(key, (len(numbers) + at + 1) * STEP)
    scheduler.store(context, prompt)
    for number in answer:
        scheduler.store(context, two_groups([number]))
    scheduler.manager.on_request_finished(context)
    scheduler.manager.cache.check_invariants()
    return found


def test_with_two_groups_a_prompt_that_comes_back_outlasts_a_flood() -> None:
    scheduler = Scheduler(num_host=24, num_disk=0, block_sizes=(STEP, STEP))
    fresh = iter(range(10, 250))
    found = 0
    for _ in range(60):
        found = serve(scheduler, (1, 2, 3))
        serve(scheduler, [next(fresh) for _ in range(4)])
    assert found == 6
    assert scheduler.manager.cache.learns


def test_with_two_groups_an_answer_leaves_before_its_question() -> None:
    scheduler = Scheduler(num_host=12, num_disk=0, block_sizes=(STEP, STEP))
    serve(scheduler, (1, 2), answer=(3, 4))
    serve(scheduler, (11, 12, 13, 14))
    kept = scheduler.manager.cache.lookup(two_groups((1, 2, 3, 4))).states
    assert [each is BlockState.MEMORY for each in kept] == [True, True, False, False] * 2


QUARTER = STEP // 4
UNLIKE = (STEP, QUARTER)
"""Full attention, and a window of half a step with four blocks to each of it."""


def unlike_keys(numbers: Sequence[int]) -> dict[OffloadKey, int]:
    """Return the keys that vLLM makes for a prompt, group by group, and where their blocks end."""
    prompt = [(step, part) for step in range(len(numbers)) for part in range(4)]
    hashes = [bytes([*numbers[: step + 1], part]).ljust(32, b"-") for step, part in prompt]
    return {
        make_offload_key(hashes[at], group): (at + 1) * QUARTER
        for group, every in enumerate((4, 1))
        for at in range(every - 1, len(hashes), every)
    }


def serve_unlike(scheduler: Scheduler, numbers: Sequence[int]) -> list[OffloadKey]:
    """Serve a prompt as vLLM does; return the keys of the blocks that were stored for it."""
    context = ReqContext("request")
    for key, end in unlike_keys(numbers).items():
        context.set_offload_key_position(key, end)
    scheduler.manager.on_new_request(context)
    keys = list(unlike_keys(numbers))
    scheduler.look_up(context, keys)
    output = scheduler.manager.prepare_store(keys, context)
    assert output is not None
    stored = list(output.keys_to_store)
    scheduler.manager.complete_store(set(stored), context)
    scheduler.manager.on_request_finished(context)
    scheduler.manager.cache.check_invariants()
    return stored


@pytest.fixture
def unlike() -> Scheduler:
    """A tier with room for eight steps of a prompt, of three blocks each."""
    scheduler = Scheduler(num_host=24, num_disk=0, block_sizes=UNLIKE)
    scheduler.manager.cuts = Cuts(STEP, {group_bytes(1): (0, 2 * QUARTER)})
    return scheduler


def test_blocks_that_no_cut_needs_are_not_stored(unlike: Scheduler) -> None:
    stored = serve_unlike(unlike, (1, 2))
    ends = unlike_keys((1, 2))
    assert [key for key in ends if key in stored] == stored, "in the order that vLLM gave"
    assert [ends[key] % STEP for key in stored] == [0, 0, 3 * QUARTER, 0, 3 * QUARTER, 0]


def test_a_prompt_of_unlike_blocks_that_comes_back_outlasts_a_flood(unlike: Scheduler) -> None:
    fresh = iter(range(10, 250))
    for _ in range(60):
        new = serve_unlike(unlike, (1, 2, 3))
        serve_unlike(unlike, [next(fresh) for _ in range(4)])
    assert new == []


def test_prompts_of_unlike_blocks_are_evicted_from_their_ends(unlike: Scheduler) -> None:
    serve_unlike(unlike, (1, 2, 3, 4))
    serve_unlike(unlike, (1, 2, 11, 12, 13, 14, 15, 16))
    ends = unlike_keys((1, 2, 3, 4))
    found = unlike.manager.cache.lookup(list(ends)).states
    kept = {end for end, at in zip(ends.values(), found, strict=True) if at is BlockState.MEMORY}
    assert kept == {3 * QUARTER, STEP, STEP + 3 * QUARTER, 2 * STEP}


@pytest.mark.parametrize(
    ("hint", "follows_hints", "found"),
    [(None, True, 0), ({"back_in_s": 60}, True, 2), ({"back_in_s": 60}, False, 0)],
)
def test_after_a_flood_a_conversation_is_there_if_its_request_said_so(
    hint: object, follows_hints: bool, found: int
) -> None:
    """A client may raise two blocks, a quarter of the tier."""
    scheduler = Scheduler(num_host=8, num_disk=0, follows_hints=follows_hints)
    scheduler.serve("talk", KEYS[:2], kv_transfer_params={"kvtier": hint})
    for first in (2, 4, 6, 8, 10):
        scheduler.serve(f"other {first}", KEYS[first : first + 2])
    again = scheduler.request("again", KEYS[:2])
    hits = scheduler.look_up(again, KEYS[:2])
    assert hits.count(LookupResult.HIT) == found
