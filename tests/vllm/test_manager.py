"""The scheduler's side, asked as vLLM's scheduler asks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm.judge import TO_HOST, Judge
from kvtier.connectors.vllm.manager import Advice, Shape, TierManager
from kvtier.connectors.vllm.names import Names
from kvtier.connectors.vllm.orders import Done, Hello, Report
from kvtier.connectors.vllm.placement import Placement
from kvtier.types import LoadPolicy

STEP = 128
CHUNK_BYTES = 1 << 20
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]


class Known(Names):
    """Chunks of weights that were read."""

    digest = b"n" * 32  # type: ignore[assignment]


class Scheduler:
    """Asks as vLLM's scheduler does, and says what one rank would."""

    def __init__(self, num_host: int = 4, policy: LoadPolicy = LoadPolicy.ALWAYS) -> None:
        names = Known(None, CHUNK_BYTES, "vllm")  # type: ignore[arg-type]
        placement = Placement(num_host, 8, names, num_moving=8)
        self.judge = Judge(policy, STEP, CHUNK_BYTES)
        shape = Shape((STEP,), CHUNK_BYTES)
        self.manager = TierManager(placement, self.judge, names, shape, publishes_events=True)
        self.manager.hear(Report(hellos={0: Hello(num_host, ())}))

    def request(self, name: str, keys: list[OffloadKey], **changes: object) -> ReqContext:
        context = ReqContext(name, **changes)  # type: ignore[arg-type]
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * STEP)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, keys: list[OffloadKey]) -> None:
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(set(output.keys_to_store), context)

    def carry_out(self, *failed: int, seconds: float = 0.1) -> None:
        for order in self.manager.placement.take_orders():
            num_bytes = len(order.keys) * CHUNK_BYTES
            done = Done(frozenset(failed), 1, num_bytes, seconds * len(order.keys))
            self.manager.hear(Report(done={order.order_id: done}))

    def look_up(self, context: ReqContext, keys: list[OffloadKey]) -> list[LookupResult]:
        self.manager.begin_look_up(context.req_id)
        return [self.manager.lookup(key, context) for key in keys]

    def to_disk(self, keys: list[OffloadKey]) -> None:
        """Store chunks, and have them leave host memory for others."""
        for key in keys:
            self.store(self.request("first", keys), [key])
            self.carry_out()
        others = [make_offload_key(bytes([at]) * 32, 1) for at in range(4)]
        context = self.request("others", others)
        self.store(context, others)
        self.carry_out()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_chunk_on_disk_is_asked_for_once_and_then_in_host_memory(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.request("again", KEYS[:3])
    retry = [LookupResult.RETRY] * 2 + [LookupResult.MISS]
    assert scheduler.look_up(request, KEYS[:3]) == retry
    assert scheduler.manager.advise("again", 0, 3 * STEP) is Advice.WAIT
    pending = [LookupResult.HIT_PENDING] * 2 + [LookupResult.MISS]
    assert scheduler.look_up(request, KEYS[:3]) == pending
    assert scheduler.manager.has_pending_work()
    scheduler.carry_out()
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT] * 2
    assert scheduler.manager.get_load_source(KEYS[0], request) is CacheHitSource.DISK
    assert scheduler.manager.num_worth_loading("again", 0, 2 * STEP, 3 * STEP) == 2 * STEP
    scheduler.manager.prepare_load(KEYS[:2], request)
    scheduler.manager.complete_load(KEYS[:2], request)
    assert scheduler.manager.get_load_source(KEYS[0], request) is CacheHitSource.HOST


def test_two_requests_share_what_is_on_its_way(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    for name in ("one", "other"):
        request = scheduler.request(name, KEYS[:2])
        scheduler.look_up(request, KEYS[:2])
        assert scheduler.manager.advise(name, 0, 3 * STEP) is Advice.WAIT
    assert len(scheduler.manager.placement.take_orders()) == 1


def test_request_waits_no_longer_than_computing_takes(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    step = scheduler.judge.begin_step(0.0, [(0, 1000)])
    assert step is not None
    scheduler.judge.end_step(step, 1e-6)  # so fast that no wait is worth it
    request = scheduler.request("hasty", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    advice = [scheduler.manager.advise("hasty", 0, 3 * STEP) for _ in range(2)]
    assert Advice.LOOK_AGAIN in advice
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.MISS] * 2
    assert scheduler.manager.advise("hasty", 0, 3 * STEP) is Advice.COMPUTE


def test_chunks_that_take_longer_than_computing_are_left_on_disk() -> None:
    scheduler = Scheduler(policy=LoadPolicy.AUTO)
    scheduler.to_disk(KEYS[:2])
    step = scheduler.judge.begin_step(0.0, [(0, 1000)])
    assert step is not None
    scheduler.judge.end_step(step, 0.1)
    scheduler.judge.costs.observe_copy(TO_HOST, 4 * CHUNK_BYTES, 10.0)
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.manager.advise("again", 0, 3 * STEP) is Advice.LOOK_AGAIN
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.MISS] * 2
    assert not scheduler.manager.placement.take_orders(), "nothing was begun"


def test_damaged_chunk_is_a_miss(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:2])
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    scheduler.manager.advise("again", 0, 3 * STEP)
    scheduler.carry_out(1)
    assert scheduler.look_up(request, KEYS[:2]) == [LookupResult.HIT, LookupResult.MISS]


def test_request_loads_only_from_the_tiers_that_it_names(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    scheduler.store(scheduler.request("host", KEYS[1:2]), KEYS[1:2])
    for filtered, found in (
        (TierFilter(), [LookupResult.MISS] * 2),
        (TierFilter((TierMatcher(Medium.CPU),)), [LookupResult.MISS, LookupResult.HIT]),
        (TierFilter((TierMatcher(Medium.STORAGE),)), [LookupResult.RETRY, LookupResult.MISS]),
    ):
        request = scheduler.request("picky", KEYS[:2], load_tier_filter=filtered)
        assert scheduler.look_up(request, KEYS[:2]) == found


def test_end_of_a_request_keeps_its_beginning(scheduler: Scheduler) -> None:
    """vLLM's own pool had all of it, and nothing was asked for here."""
    for key in KEYS[:4]:
        scheduler.store(scheduler.request("first", KEYS[:4]), [key])
    scheduler.manager.on_request_finished(scheduler.request("again", KEYS[:2]))
    scheduler.store(scheduler.request("other", KEYS[4:6]), KEYS[4:6])
    host = scheduler.manager.placement.host
    assert set(host) == {KEYS[0], KEYS[1], KEYS[4], KEYS[5]}


def test_chunks_of_an_adapter_stay_in_memory(scheduler: Scheduler) -> None:
    """Another process may call another adapter by the same name."""
    scheduler.to_disk(KEYS[:1])
    request = scheduler.request("adapted", KEYS[:2])
    scheduler.manager.keep_off_disk("adapted")
    assert scheduler.look_up(request, KEYS[:1]) == [LookupResult.MISS]
    output = scheduler.manager.prepare_store(KEYS[1:2], request)
    assert output is not None
    scheduler.manager.on_request_finished(request)
    scheduler.manager.complete_store(set(output.keys_to_store), request)
    assert scheduler.manager.placement.take_orders() == []


def test_events_tell_of_both_tiers(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    events = list(scheduler.manager.take_events())
    assert [(each.medium, each.removed) for each in events if KEYS[0] in each.keys] == [
        (Medium.CPU, False),
        (Medium.STORAGE, False),
        (Medium.CPU, True),
    ]
    assert list(scheduler.manager.take_events()) == []


def test_emptied_cache_has_nothing_on_disk_either(scheduler: Scheduler) -> None:
    scheduler.to_disk(KEYS[:1])
    scheduler.manager.reset_cache()
    scheduler.carry_out()
    request = scheduler.request("again", KEYS[:1])
    assert scheduler.look_up(request, KEYS[:1]) == [LookupResult.MISS]
