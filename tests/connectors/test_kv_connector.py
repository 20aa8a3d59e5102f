"""Both halves of kvtier's own connector, called as vLLM calls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.cache.block_cache import Reserved
from kvtier.cache.transfer import CopyJob, TransferEngine
from kvtier.connectors.vllm.kv_connector.messages import NOTHING
from kvtier.core.errors import DeviceError
from kvtier.core.hints import Hint
from kvtier.core.types import DEVICE, HOST, CacheMode
from kvtier.devices import CopyBatch, Direction
from kvtier.observe.specs import VLLM_HINT_ACTIONS, VLLM_MOVED_BYTES
from tests.connectors.kv_harness import LAYERS, PAGE, KvHarness, are_equal

TEXT = "the quick brown fox jump"
"""Six pages."""


@pytest.fixture
def make() -> Iterator[Callable[..., KvHarness]]:
    made: list[KvHarness] = []

    def harness(**options: Any) -> KvHarness:
        made.append(KvHarness(**options))
        return made[-1]

    yield harness
    for each in made:
        each.half.manager.cache.check_invariants()
        each.close()


@pytest.fixture
def harness(make: Callable[..., KvHarness]) -> KvHarness:
    return make()


def _generates(num_before: int, pages: tuple[list[int]] | None = None) -> Any:
    """Return vLLM's rows of running requests: "first", with new pages or without."""
    return SimpleNamespace(
        req_ids=["first"],
        resumed_req_ids=set(),
        new_block_ids=[pages],
        num_computed_tokens=[num_before],
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num", [1, 2])
def test_pages_come_back_elsewhere_byte_for_byte(
    make: Callable[..., KvHarness], num_ranks: int, num: int
) -> None:
    harness = make(num_ranks=num_ranks, num=num)
    harness.fill(range(6), seed=1)
    before = harness.bytes_of(range(6))
    first = harness.serve("first", TEXT, range(6))
    assert harness.half.finish(first, [range(6)]) is False, "nothing is under way any more"
    harness.fill(range(24), seed=2)
    pages = [9, 20, 3, 14, 7, 11, 12]
    harness.load("again", TEXT, pages)
    assert harness.loaded == {"again"}
    assert are_equal(harness.bytes_of(pages[:6]), before)
    assert not harness.failed
    num_bytes = sum(each.numel() for each in before)
    moved = harness.half.manager.counts.take()
    assert moved[VLLM_MOVED_BYTES, (DEVICE, HOST)] == num_bytes
    assert moved[VLLM_MOVED_BYTES, (HOST, DEVICE)] == num_bytes


def test_kv_that_all_ranks_compute_is_stored_by_the_first_and_loaded_by_all(
    make: Callable[..., KvHarness],
) -> None:
    harness = make(num_ranks=2, replicated=True)
    first, second = harness.ranks
    harness.fill(range(6), seed=1)
    before = harness.bytes_of(range(6))[: len(LAYERS)]
    harness.begin("first", TEXT, range(6))
    assert (len(first.worker.job_ids), len(second.worker.job_ids)) == (1, 0)
    harness.hear(second)
    assert harness.asks(harness.request("early", TEXT + "s")) is None, (
        "the first has not reported it"
    )
    harness.hear(first)
    harness.fill(range(24), seed=2)
    harness.load("again", TEXT, range(10, 17))
    assert harness.loaded == {"again"}
    assert are_equal(harness.bytes_of(range(10, 16)), [*before, *before])


@pytest.mark.parametrize("name", ["do_remote_prefill", "remote_prefiller"])
def test_a_request_that_another_connector_transfers_loads_nothing_and_is_stored(
    harness: KvHarness, name: str
) -> None:
    """vLLM takes the first connector with a hit, and the pages of a prefill server would expire."""
    transfer = {name: True}
    harness.serve("first", TEXT, range(6), kv_transfer_params={name: True})
    again = harness.request("again", TEXT + "s", kv_transfer_params=transfer)
    assert harness.asks(again) == 0
    transfer[name] = False  # as the other connector does when the pages have arrived
    assert harness.asks(again) == 6 * PAGE


def _no_call(*_: object, **__: object) -> Any:
    raise AssertionError("this is not to be called")


def test_an_engine_that_saves_only_stores_all_and_looks_up_nothing(
    make: Callable[..., KvHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(mode=CacheMode.SAVE_ONLY)
    cache = harness.half.manager.cache
    monkeypatch.setattr(cache, "lookup", _no_call)
    harness.serve("first", TEXT, range(6))
    assert cache.usage()[HOST].num_used == 6
    assert harness.asks(harness.request("again", TEXT + "s")) == 0


def test_an_engine_that_loads_only_reserves_nothing(
    make: Callable[..., KvHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(mode=CacheMode.LOAD_ONLY)
    cache = harness.half.manager.cache
    monkeypatch.setattr(cache, "reserve", _no_call)
    first = harness.serve("first", TEXT, range(6))
    assert harness.half.finish(first, [range(6)]) is False, "its pages are free at once"
    assert cache.usage()[HOST].num_used == 0
    assert not harness.half.has_pending_work


@pytest.mark.parametrize(
    ("params", "num_stored", "num_loaded"),
    [
        ({"max_load_tokens": 2 * PAGE + 1}, 6, 2),
        ({"max_load_tokens": 0}, 6, 0),
        ({"max_load_tokens": "many"}, 6, 6),
        ({"max_offload_tokens": 3 * PAGE}, 3, 6),
        ({"kv_load_tiers": [{"medium": "storage"}]}, 6, 0),
        ({"kv_load_tiers": [{"medium": "cpu", "locality": "local"}]}, 6, 6),
        ({"kv_load_tiers": [{"medium": "tape"}]}, 6, 6),
        ({"kv_load_tiers": []}, 6, 0),
    ],
)
def test_clients_limits_hold(
    harness: KvHarness, params: dict[str, object], num_stored: int, num_loaded: int
) -> None:
    harness.serve("first", TEXT, range(6), kv_transfer_params=params)
    assert harness.half.manager.cache.usage()[HOST].num_used == num_stored
    harness.serve("other", TEXT[::-1], range(6, 12))
    limited = harness.request("limited", TEXT[::-1] + "s", kv_transfer_params=params)
    assert harness.asks(limited) == num_loaded * PAGE


def test_load_begins_within_a_block_behind_what_the_device_has(
    make: Callable[..., KvHarness],
) -> None:
    harness = make(num=2)
    harness.fill(range(6), seed=1)
    harness.half.finish(harness.serve("first", TEXT, range(6)), [range(6)])
    before = harness.bytes_of(range(3, 6))
    harness.fill(range(24), seed=2)
    untouched = harness.bytes_of([10, 11, 12])
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again, 3 * PAGE) == 3 * PAGE
    pages = [10, 11, 12, 13, 14, 15, 16]
    harness.gets_pages(again, pages, 3 * PAGE)
    harness.step()
    assert are_equal(harness.bytes_of([13, 14, 15]), before)
    assert are_equal(harness.bytes_of([10, 11, 12]), untouched)


def test_last_token_is_computed_even_if_all_blocks_are_there(harness: KvHarness) -> None:
    harness.serve("first", TEXT, range(6))
    assert harness.asks(harness.request("again", TEXT)) == len(TEXT) - PAGE


def test_request_that_wants_no_cached_kv_gets_none(harness: KvHarness) -> None:
    harness.serve("first", TEXT, range(6))
    again = harness.request("again", TEXT + "s", skip_reading_prefix_cache=True)
    assert harness.asks(again) == 0


def test_finished_request_keeps_its_pages_until_every_rank_has_stored_them(
    make: Callable[..., KvHarness],
) -> None:
    harness = make(num_ranks=2)
    request = harness.begin("first", TEXT, range(6))
    request.num_computed_tokens = len(TEXT)
    assert harness.half.finish(request, [range(6)]) is True
    finishing = harness.message()
    assert finishing.finishing == ["first"]
    assert harness.half.has_pending_work
    first, second = harness.ranks
    first.begin_step(finishing)
    harness.hear(first)
    assert harness.stored == {"first"}, "of the first rank"
    assert harness.asks(harness.request("again", TEXT + "s")) is None, "not all ranks have it"
    harness.stored.clear()
    second.begin_step(finishing)
    harness.hear(second)
    assert harness.stored == {"first"}
    assert harness.asks(harness.request("more", TEXT + "s")) == len(TEXT)


def test_stores_of_a_step_that_vllm_did_not_end_begin_in_the_next(harness: KvHarness) -> None:
    request = harness.request("first", TEXT)
    harness.asks(request)
    (rank,) = harness.ranks
    rank.begin_step(harness.message((request, range(6), len(TEXT))))
    harness.run(harness.message())
    assert not harness.half._jobs
    assert harness.asks(harness.request("again", TEXT + "s")) == len(TEXT)


def test_request_that_is_aborted_while_it_loads_leaves_nothing_behind(
    make: Callable[..., KvHarness],
) -> None:
    """vLLM keeps a load's pages until all ranks have reported it, whatever ``finish`` returns."""
    harness = make(num_ranks=2)
    harness.serve("first", TEXT, range(6))
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == len(TEXT)
    harness.gets_pages(again, range(10, 17), len(TEXT))
    harness.run(harness.message(), ends=False)
    assert harness.half.finish(again, [range(10, 17)]) is False
    harness.hear()
    assert harness.loaded == {"again"}
    assert not harness.half._jobs
    harness.half.manager.cache.check_invariants()
    assert harness.asks(harness.request("more", TEXT + "s")) == len(TEXT)


def test_request_that_is_aborted_while_another_connector_loads_its_pages_stores_nothing(
    harness: KvHarness,
) -> None:
    """vLLM counts the tokens as computed as soon as the load begins."""
    request = harness.request("first", TEXT)
    assert harness.asks(request) == 0
    harness.gets_pages(request, range(6))
    request.num_computed_tokens = len(TEXT)
    assert harness.half.finish(request, [range(6)]) is False
    harness.step()
    assert harness.half.manager.cache.usage()[HOST].num_used == 0


def test_pages_that_another_connector_failed_to_load_are_stored_when_they_are_computed(
    harness: KvHarness,
) -> None:
    request, other = harness.request("first", TEXT), harness.request("other", TEXT.upper())
    for each in (request, other):
        harness.asks(each)
    scheduled = (request, range(6), len(TEXT)), (other, range(6, 12), len(TEXT))
    harness.run(harness.message(*scheduled), ends=False)
    harness.half.drop_failed({2})
    harness.hear()
    assert harness.asks(harness.request("again", TEXT + "s")) == 0, "computed behind a wrong page"
    assert harness.asks(harness.request("more", TEXT.upper() + "s")) == len(TEXT)
    harness.step(cached=_generates(0), num_scheduled={"first": len(TEXT)})
    assert harness.asks(harness.request("later", TEXT + "s")) == len(TEXT)


def test_preempted_request_stores_nothing_and_its_slots_wait_for_all_ranks(
    make: Callable[..., KvHarness],
) -> None:
    harness = make(num_ranks=2, num_slots=6)
    harness.begin("first", TEXT, range(6))
    used = harness.half.manager.cache.usage()[HOST].num_used
    harness.run(harness.message(preempted={"first"}), ends=False)
    harness.hear(harness.ranks[0])
    assert harness.half.manager.cache.usage()[HOST].num_used == used == 6, "one rank may still copy"
    harness.hear(harness.ranks[1])
    assert harness.half.manager.cache.usage()[HOST].num_used == 0
    assert harness.asks(harness.request("again", TEXT + "s")) == 0


def test_request_that_was_preempted_is_stored_when_it_runs_again(harness: KvHarness) -> None:
    harness.begin("first", TEXT, range(6))
    harness.step(preempted={"first"})
    harness.fill(range(10, 16), seed=3)
    before = harness.bytes_of(range(10, 16))
    resumed = _generates(0, (list(range(10, 16)),))
    resumed.resumed_req_ids.add("first")
    harness.step(cached=resumed, num_scheduled={"first": len(TEXT)})
    harness.load("again", TEXT, range(7))
    assert are_equal(harness.bytes_of(range(6)), before)


def test_blocks_are_stored_as_they_become_full(harness: KvHarness) -> None:
    request = harness.request("first", TEXT)
    harness.asks(request)
    harness.step((request, [0, 1], PAGE + 1))
    assert harness.half.manager.cache.usage()[HOST].num_used == 1
    for before, pages in ((PAGE + 1, None), (2 * PAGE, ([2],)), (2 * PAGE + 1, None)):
        num = 3 if before == PAGE + 1 else 1
        harness.step(cached=_generates(before, pages), num_scheduled={"first": num})
    assert harness.half.manager.cache.usage()[HOST].num_used == 2
    request.num_computed_tokens = 2 * PAGE + 2
    request.num_tokens = 2 * PAGE + 3
    assert harness.half.finish(request, [[0, 1, 2]]) is False
    assert harness.half.manager.cache.usage()[HOST].num_used == 2


def test_step_in_which_nothing_moves_is_one_object_and_needs_no_answer(harness: KvHarness) -> None:
    request = harness.request("first", TEXT)
    harness.asks(request)
    harness.step((request, range(7), len(TEXT)))
    (rank,) = harness.ranks
    rank.worker._next_look_s = math.inf
    for before in range(len(TEXT), len(TEXT) + 3):
        message = harness.message(cached=_generates(before), num_scheduled={"first": 1})
        assert message is NOTHING
        harness.run(message, ends=False)
        assert rank.take_finished() == (set(), set())
        assert rank.take_message() is None
    request.num_tokens = len(TEXT) + PAGE + 1
    request.block_hashes = harness.request("first", TEXT + "s" * PAGE).block_hashes
    grown = harness.message(cached=_generates(len(TEXT) + PAGE, ([7],)), num_scheduled={"first": 1})
    assert [job.pages[0].pages for job in grown.stores] == [[6]]


def test_stores_that_were_to_begin_in_a_step_end_before_a_request_does(harness: KvHarness) -> None:
    request = harness.request("first", TEXT)
    harness.asks(request)
    (rank,) = harness.ranks
    rank.begin_step(harness.message((request, range(6), len(TEXT))))
    request.num_computed_tokens = len(TEXT)
    assert harness.half.finish(request, [range(6)]) is True
    rank.begin_step(NOTHING)  # vLLM did not end the step before
    harness.run(harness.message())
    assert harness.stored == {"first"}
    assert harness.asks(harness.request("again", TEXT + "s")) == len(TEXT)


def test_pages_of_a_load_that_failed_are_reported_and_its_block_forgotten(
    harness: KvHarness,
) -> None:
    harness.serve("first", TEXT, range(6))
    worker = harness.ranks[0].worker
    worker._engine.close()
    worker._engine = FailingLoads(worker._device)
    worker._engine.start()
    harness.load("again", TEXT, range(10, 17))
    assert harness.loaded == {"again"}
    assert harness.failed == set(range(10, 16))
    assert harness.asks(harness.request("more", TEXT + "s")) == 0


class FailingLoads(TransferEngine):
    """Engine whose copies to the device fail."""

    def submit(self, steps: Any, direction: Direction) -> CopyJob:
        batches: list[CopyBatch] = list(steps)
        if direction is Direction.STORE:
            return super().submit(batches, direction)
        job = CopyJob(0, 1)
        job.finish(DeviceError("a copy failed, as was planned"))
        return job


def test_reset_forgets_all_and_the_ranks_end_their_copies_first(harness: KvHarness) -> None:
    harness.serve("first", TEXT, range(6))
    harness.begin("second", TEXT[::-1], range(6, 12))
    harness.half.reset()
    harness.half.manager.cache.check_invariants()
    assert harness.half.manager.cache.usage()[HOST].num_used == 0
    after = harness.message()
    assert after.waits
    harness.ranks[0].begin_step(after)
    assert all(copy.done for copy in harness.ranks[0].worker._copies.values())
    harness.hear()
    assert harness.asks(harness.request("again", TEXT + "s")) == 0
    assert not harness.half.has_pending_work


def test_requests_that_began_before_new_weights_are_not_kept(harness: KvHarness) -> None:
    first = harness.request("first", TEXT)
    harness.asks(first)
    harness.gets_pages(first, range(6))
    harness.half.reset()
    harness.step((first, range(6), len(TEXT)))
    assert harness.half.manager.cache.usage()[HOST].num_used == 0
    behind = harness.request("behind", TEXT, num_computed_tokens=2 * PAGE)
    harness.asks(behind, 2 * PAGE)
    harness.step((behind, range(6, 12), len(TEXT) - 2 * PAGE))
    assert harness.half.manager.cache.usage()[HOST].num_used == 0, (
        "vLLM found old KV in its own memory"
    )
    harness.serve("anew", TEXT, range(12, 18))
    assert harness.half.manager.cache.usage()[HOST].num_used == 6
    harness.half.manager.pool_was_emptied()
    other = harness.request("other", TEXT[::-1], num_computed_tokens=2 * PAGE)
    harness.asks(other, 2 * PAGE)
    harness.step((other, range(18, 24), len(TEXT) - 2 * PAGE))
    assert harness.half.manager.cache.usage()[HOST].num_used == 12


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_that_a_rank_finds_changed_end_its_copies_and_all_that_is_kept(
    make: Callable[..., KvHarness], num_ranks: int
) -> None:
    harness = make(num_ranks=num_ranks)
    model = torch.nn.Linear(8, 8)
    harness.ranks[-1].worker.watch_weights(model)
    harness.serve("first", TEXT, range(6))
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == len(TEXT), "nothing has changed"
    model.weight.data.add_(1)
    harness.gets_pages(again, range(10, 17), len(TEXT))
    harness.step()
    assert (harness.loaded, harness.failed) == ({"again"}, set(range(10, 16)))
    assert harness.half.manager.cache.usage()[HOST].num_used == 0
    harness.serve("other", TEXT[::-1], range(18, 24))
    model.weight.data.add_(1)
    more = harness.request("more", TEXT)
    harness.asks(more)
    harness.step((more, range(6), len(TEXT)))
    assert harness.half.manager.cache.usage()[HOST].num_used == 0, "nor is what was being stored"
    harness.serve("last", TEXT, range(6))
    assert harness.asks(harness.request("found", TEXT + "s")) == len(TEXT)
    assert harness.half.manager.num_new_weights == 2


def test_full_host_memory_stores_what_it_can_later(make: Callable[..., KvHarness]) -> None:
    harness = make(num_slots=4)
    harness.serve("first", TEXT[: 4 * PAGE], range(4))
    held = harness.request("held", TEXT[: 4 * PAGE] + "s")
    assert harness.asks(held) == 4 * PAGE
    harness.gets_pages(held, range(10, 15), 4 * PAGE)
    other = harness.request("other", TEXT[::-1])
    assert harness.asks(other) == 0
    message = harness.message((other, range(16, 22), len(TEXT)))
    assert (len(message.loads), len(message.stores)) == (1, 0), "every slot is held"
    harness.run(message)
    other.num_computed_tokens = len(TEXT)
    other.num_tokens = len(TEXT) + 1
    keeps = harness.half.finish(other, [range(16, 22)])
    harness.step()
    assert keeps is bool(harness.stored)


def test_requests_of_a_step_are_stored_by_one_call_each_block_once(
    harness: KvHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    cache = harness.half.manager.cache
    reserve = cache.reserve

    def noted(keys: Collection[bytes]) -> Reserved | None:
        calls.append(len(keys))
        return reserve(keys)

    monkeypatch.setattr(cache, "reserve", noted)
    requests = [
        harness.request("first", TEXT),
        harness.request("second", TEXT[:12] + "another one"),
    ]
    harness.fill(range(12), seed=1)
    for cached in harness.caches:  # the same three blocks begin both prompts
        for layer in cached.values():
            layer[:, 6:9] = layer[:, 0:3]
    before = harness.bytes_of(range(6)), harness.bytes_of(range(6, 11))
    scheduled = []
    for request, pages in zip(requests, (range(6), range(6, 12)), strict=True):
        assert harness.asks(request) == 0
        harness.gets_pages(request, pages)
        scheduled.append((request, pages, request.num_tokens))
    harness.step(*scheduled)
    assert calls == [6 + 5]
    assert cache.usage()[HOST].num_used == 6 + 2
    for request, right in zip(requests, before, strict=True):
        harness.half.finish(request, [[]])
        pages = range(12, 12 + len(right[0][0]))
        again = harness.request(f"{request.request_id} again", "")
        again.block_hashes, again.num_tokens = request.block_hashes, request.num_tokens + 1
        assert harness.asks(again) == len(pages) * PAGE
        harness.gets_pages(again, [*pages, 20], len(pages) * PAGE)
        harness.step()
        assert are_equal(harness.bytes_of(pages), right)
        harness.half.finish(again, [[]])


def test_requests_of_a_step_that_have_no_room_together_are_stored_as_far_as_there_is(
    make: Callable[..., KvHarness],
) -> None:
    harness = make(num_slots=8)
    requests = [harness.request("first", TEXT), harness.request("second", TEXT[::-1])]
    for request, pages in zip(requests, (range(6), range(6, 12)), strict=True):
        assert harness.asks(request) == 0
        harness.gets_pages(request, pages)
    message = harness.message(*((request, range(6), len(TEXT)) for request in requests))
    assert [len(job.pages[0].pages) for job in message.stores] == [6]
    harness.run(message)
    assert harness.asks(harness.request("again", TEXT + "s")) == len(TEXT)


def test_hints_of_an_orchestrator_are_followed_and_unknown_ones_counted(
    harness: KvHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Hint] = []
    cache = harness.half.manager.cache
    monkeypatch.setattr(cache, "hint", lambda keys, hint, block_size: heard.append(hint))
    kinds = ("kv.fetch", "kvtier.hint", "another")
    actions: list[dict[str, object]] = [
        {
            "action_id": "1",
            "action_type": kind,
            "action_version": "1.0",
            "payload": {"block_hashes": []} if kind == "kv.fetch" else {"back_in_s": 5},
        }
        for kind in kinds
    ]
    envelope = {"protocol_version": "0.1", "message_id": "1", "actions": actions}
    request = harness.request("first", TEXT, kv_hints=envelope)
    harness.asks(request)
    harness.gets_pages(request, range(6), 0)
    harness.step()
    harness.half.finish(request, [range(6)])
    assert heard == [Hint(back_in_s=5)]
    counted = harness.half.manager.counts.take()
    told = {labels[0]: num for (spec, labels), num in counted.items() if spec is VLLM_HINT_ACTIONS}
    assert told == {"kv.fetch": 1, "kvtier.hint": 1, "unknown": 1}
