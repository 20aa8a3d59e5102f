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
from kvtier.core.types import DEVICE, HOST
from kvtier.devices import CopyBatch, Direction
from kvtier.observe.specs import VLLM_HINT_ACTIONS, VLLM_MOVED_BYTES
from tests.connectors.kv_world import LAYERS, PAGE, KvWorld

TEXT = "the quick brown fox jump"
"""Six pages."""


@pytest.fixture
def make() -> Iterator[Callable[..., KvWorld]]:
    made: list[KvWorld] = []

    def world(**options: Any) -> KvWorld:
        made.append(KvWorld(**options))
        return made[-1]

    yield world
    for each in made:
        each.half.manager.cache.check_invariants()
        each.close()


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


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
    make: Callable[..., KvWorld], num_ranks: int, num: int
) -> None:
    world = make(num_ranks=num_ranks, num=num)
    world.fill(range(6), seed=1)
    before = world.bytes_of(range(6))
    first = world.serve("first", TEXT, range(6))
    assert world.half.finish(first, range(6)) is False, "nothing is under way any more"
    world.fill(range(24), seed=2)
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT)
    pages = [9, 20, 3, 14, 7, 11, 12]
    world.gets_pages(again, pages, len(TEXT))
    world.step()
    assert world.loaded == {"again"}
    assert _are_equal(world.bytes_of(pages[:6]), before)
    assert not world.failed
    num_bytes = sum(each.numel() for each in before)
    moved = world.half.manager.counts.take()
    assert moved[VLLM_MOVED_BYTES, (DEVICE, HOST)] == num_bytes
    assert moved[VLLM_MOVED_BYTES, (HOST, DEVICE)] == num_bytes


def test_kv_that_all_ranks_compute_is_stored_by_the_first_and_loaded_by_all(
    make: Callable[..., KvWorld],
) -> None:
    world = make(num_ranks=2, replicated=True)
    first, second = world.ranks
    world.fill(range(6), seed=1)
    before = world.bytes_of(range(6))[: len(LAYERS)]
    request = world.request("first", TEXT)
    world.asks(request)
    world.run(world.message((request, range(6), len(TEXT))), ends=False)
    assert (len(first.worker.job_ids), len(second.worker.job_ids)) == (1, 0)
    world.hear(second)
    assert world.asks(world.request("early", TEXT + "s")) is None, "the first has not reported it"
    world.hear(first)
    world.fill(range(24), seed=2)
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT)
    world.gets_pages(again, range(10, 17), len(TEXT))
    world.step()
    assert world.loaded == {"again"}
    assert _are_equal(world.bytes_of(range(10, 16)), [*before, *before])


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
    make: Callable[..., KvWorld], params: dict[str, object], num_stored: int, num_loaded: int
) -> None:
    world = make()
    world.serve("first", TEXT, range(6), kv_transfer_params=params)
    assert world.half.manager.cache.usage()[HOST].num_used == num_stored
    world.serve("other", TEXT[::-1], range(6, 12))
    limited = world.request("limited", TEXT[::-1] + "s", kv_transfer_params=params)
    assert world.asks(limited) == num_loaded * PAGE


def test_load_begins_within_a_block_behind_what_the_device_has(
    make: Callable[..., KvWorld],
) -> None:
    world = make(num=2)
    world.fill(range(6), seed=1)
    world.half.finish(world.serve("first", TEXT, range(6)), range(6))
    before = world.bytes_of(range(3, 6))
    world.fill(range(24), seed=2)
    untouched = world.bytes_of([10, 11, 12])
    again = world.request("again", TEXT + "s")
    assert world.asks(again, 3 * PAGE) == 3 * PAGE
    pages = [10, 11, 12, 13, 14, 15, 16]
    world.gets_pages(again, pages, 3 * PAGE)
    world.step()
    assert _are_equal(world.bytes_of([13, 14, 15]), before)
    assert _are_equal(world.bytes_of([10, 11, 12]), untouched)


def test_last_token_is_computed_even_if_all_blocks_are_there(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    world.serve("first", TEXT, range(6))
    assert world.asks(world.request("again", TEXT)) == len(TEXT) - PAGE


def test_request_that_wants_no_cached_kv_gets_none(make: Callable[..., KvWorld]) -> None:
    world = make()
    world.serve("first", TEXT, range(6))
    again = world.request("again", TEXT + "s", skip_reading_prefix_cache=True)
    assert world.asks(again) == 0


def test_finished_request_keeps_its_pages_until_every_rank_has_stored_them(
    make: Callable[..., KvWorld],
) -> None:
    world = make(num_ranks=2)
    request = world.request("first", TEXT)
    world.asks(request)
    message = world.message((request, range(6), len(TEXT)))
    world.run(message, ends=False)
    request.num_computed_tokens = len(TEXT)
    assert world.half.finish(request, range(6)) is True
    finishing = world.message()
    assert finishing.finishing == ["first"]
    assert world.half.has_pending_work
    first, second = world.ranks
    first.begin_step(finishing)
    world.hear(first)
    assert world.stored == {"first"}, "of the first rank"
    assert world.asks(world.request("again", TEXT + "s")) is None, "not all ranks have it"
    world.stored.clear()
    second.begin_step(finishing)
    world.hear(second)
    assert world.stored == {"first"}
    assert world.asks(world.request("more", TEXT + "s")) == len(TEXT)


def test_stores_of_a_step_that_vllm_did_not_end_begin_in_the_next(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    request = world.request("first", TEXT)
    world.asks(request)
    (rank,) = world.ranks
    rank.begin_step(world.message((request, range(6), len(TEXT))))
    world.run(world.message())
    assert not world.half._jobs
    assert world.asks(world.request("again", TEXT + "s")) == len(TEXT)


def test_request_that_is_aborted_while_it_loads_leaves_nothing_behind(
    make: Callable[..., KvWorld],
) -> None:
    """vLLM keeps a load's pages until all ranks have reported it, whatever ``finish`` returns."""
    world = make(num_ranks=2)
    world.serve("first", TEXT, range(6))
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT)
    world.gets_pages(again, range(10, 17), len(TEXT))
    world.run(world.message(), ends=False)
    assert world.half.finish(again, range(10, 17)) is False
    world.hear()
    assert world.loaded == {"again"}
    assert not world.half._jobs
    world.half.manager.cache.check_invariants()
    assert world.asks(world.request("more", TEXT + "s")) == len(TEXT)


def test_request_that_is_aborted_while_another_connector_loads_its_pages_stores_nothing(
    make: Callable[..., KvWorld],
) -> None:
    """vLLM counts the tokens as computed as soon as the load begins."""
    world = make()
    request = world.request("first", TEXT)
    assert world.asks(request) == 0
    world.gets_pages(request, range(6))
    request.num_computed_tokens = len(TEXT)
    assert world.half.finish(request, range(6)) is False
    world.step()
    assert world.half.manager.cache.usage()[HOST].num_used == 0


def test_pages_that_another_connector_failed_to_load_are_stored_when_they_are_computed(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    request, other = world.request("first", TEXT), world.request("other", TEXT.upper())
    for each in (request, other):
        world.asks(each)
    scheduled = (request, range(6), len(TEXT)), (other, range(6, 12), len(TEXT))
    world.run(world.message(*scheduled), ends=False)
    world.half.drop_failed({2})
    world.hear()
    assert world.asks(world.request("again", TEXT + "s")) == 0, "computed behind a wrong page"
    assert world.asks(world.request("more", TEXT.upper() + "s")) == len(TEXT)
    world.step(cached=_generates(0), num_scheduled={"first": len(TEXT)})
    assert world.asks(world.request("later", TEXT + "s")) == len(TEXT)


def test_preempted_request_stores_nothing_and_its_slots_wait_for_all_ranks(
    make: Callable[..., KvWorld],
) -> None:
    world = make(num_ranks=2, num_slots=6)
    request = world.request("first", TEXT)
    world.asks(request)
    world.run(world.message((request, range(6), len(TEXT))), ends=False)
    used = world.half.manager.cache.usage()[HOST].num_used
    world.run(world.message(preempted={"first"}), ends=False)
    world.hear(world.ranks[0])
    assert world.half.manager.cache.usage()[HOST].num_used == used == 6, "one rank may still copy"
    world.hear(world.ranks[1])
    assert world.half.manager.cache.usage()[HOST].num_used == 0
    assert world.asks(world.request("again", TEXT + "s")) == 0


def test_request_that_was_preempted_is_stored_when_it_runs_again(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    request = world.request("first", TEXT)
    world.asks(request)
    world.run(world.message((request, range(6), len(TEXT))), ends=False)
    world.step(preempted={"first"})
    world.fill(range(10, 16), seed=3)
    before = world.bytes_of(range(10, 16))
    resumed = _generates(0, (list(range(10, 16)),))
    resumed.resumed_req_ids.add("first")
    world.step(cached=resumed, num_scheduled={"first": len(TEXT)})
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT)
    world.gets_pages(again, range(7), len(TEXT))
    world.step()
    assert _are_equal(world.bytes_of(range(6)), before)


def test_blocks_are_stored_as_they_become_full(make: Callable[..., KvWorld]) -> None:
    world = make()
    request = world.request("first", TEXT)
    world.asks(request)
    world.step((request, [0, 1], PAGE + 1))
    assert world.half.manager.cache.usage()[HOST].num_used == 1
    for before, pages in ((PAGE + 1, None), (2 * PAGE, ([2],)), (2 * PAGE + 1, None)):
        num = 3 if before == PAGE + 1 else 1
        world.step(cached=_generates(before, pages), num_scheduled={"first": num})
    assert world.half.manager.cache.usage()[HOST].num_used == 2
    request.num_computed_tokens = 2 * PAGE + 2
    request.num_tokens = 2 * PAGE + 3
    assert world.half.finish(request, [0, 1, 2]) is False
    assert world.half.manager.cache.usage()[HOST].num_used == 2


def test_step_in_which_nothing_moves_is_one_object_and_needs_no_answer(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    request = world.request("first", TEXT)
    world.asks(request)
    world.step((request, range(7), len(TEXT)))
    (rank,) = world.ranks
    rank.worker._next_look_s = math.inf
    for before in range(len(TEXT), len(TEXT) + 3):
        message = world.message(cached=_generates(before), num_scheduled={"first": 1})
        assert message is NOTHING
        world.run(message, ends=False)
        assert rank.take_finished() == (set(), set())
        assert rank.take_message() is None
    request.num_tokens = len(TEXT) + PAGE + 1
    request.block_hashes = world.request("first", TEXT + "s" * PAGE).block_hashes
    grown = world.message(cached=_generates(len(TEXT) + PAGE, ([7],)), num_scheduled={"first": 1})
    assert [job.pages[0].pages for job in grown.stores] == [[6]]


def test_stores_that_were_to_begin_in_a_step_end_before_a_request_does(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    request = world.request("first", TEXT)
    world.asks(request)
    (rank,) = world.ranks
    rank.begin_step(world.message((request, range(6), len(TEXT))))
    request.num_computed_tokens = len(TEXT)
    assert world.half.finish(request, range(6)) is True
    rank.begin_step(NOTHING)  # vLLM did not end the step before
    world.run(world.message())
    assert world.stored == {"first"}
    assert world.asks(world.request("again", TEXT + "s")) == len(TEXT)


def test_pages_of_a_load_that_failed_are_reported_and_its_block_forgotten(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    world.serve("first", TEXT, range(6))
    worker = world.ranks[0].worker
    worker._engine.close()
    worker._engine = FailingLoads(worker._device)
    worker._engine.start()
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT)
    world.gets_pages(again, range(10, 17), len(TEXT))
    world.step()
    assert world.loaded == {"again"}
    assert world.failed == set(range(10, 16))
    assert world.asks(world.request("more", TEXT + "s")) == 0


class FailingLoads(TransferEngine):
    """Engine whose copies to the device fail."""

    def submit(self, steps: Any, direction: Direction) -> CopyJob:
        batches: list[CopyBatch] = list(steps)
        if direction is Direction.STORE:
            return super().submit(batches, direction)
        job = CopyJob(0, 1)
        job.finish(DeviceError("a copy failed, as was planned"))
        return job


def test_reset_forgets_all_and_the_ranks_end_their_copies_first(
    make: Callable[..., KvWorld],
) -> None:
    world = make()
    world.serve("first", TEXT, range(6))
    request = world.request("second", TEXT[::-1])
    world.asks(request)
    world.run(world.message((request, range(6, 12), len(TEXT))), ends=False)
    world.half.reset()
    world.half.manager.cache.check_invariants()
    assert world.half.manager.cache.usage()[HOST].num_used == 0
    after = world.message()
    assert after.waits
    world.ranks[0].begin_step(after)
    assert all(copy.done for copy in world.ranks[0].worker._copies.values())
    world.hear()
    assert world.asks(world.request("again", TEXT + "s")) == 0
    assert not world.half.has_pending_work


def test_requests_that_began_before_new_weights_are_not_kept(make: Callable[..., KvWorld]) -> None:
    world = make()
    first = world.request("first", TEXT)
    world.asks(first)
    world.gets_pages(first, range(6))
    world.half.reset()
    world.step((first, range(6), len(TEXT)))
    assert world.half.manager.cache.usage()[HOST].num_used == 0
    behind = world.request("behind", TEXT, num_computed_tokens=2 * PAGE)
    world.asks(behind, 2 * PAGE)
    world.step((behind, range(6, 12), len(TEXT) - 2 * PAGE))
    assert world.half.manager.cache.usage()[HOST].num_used == 0, (
        "vLLM found old KV in its own memory"
    )
    world.serve("anew", TEXT, range(12, 18))
    assert world.half.manager.cache.usage()[HOST].num_used == 6
    world.half.manager.pool_was_emptied()
    other = world.request("other", TEXT[::-1], num_computed_tokens=2 * PAGE)
    world.asks(other, 2 * PAGE)
    world.step((other, range(18, 24), len(TEXT) - 2 * PAGE))
    assert world.half.manager.cache.usage()[HOST].num_used == 12


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_that_a_rank_finds_changed_end_its_copies_and_all_that_is_kept(
    make: Callable[..., KvWorld], num_ranks: int
) -> None:
    world = make(num_ranks=num_ranks)
    model = torch.nn.Linear(8, 8)
    world.ranks[-1].worker.watch_weights(model)
    world.serve("first", TEXT, range(6))
    again = world.request("again", TEXT + "s")
    assert world.asks(again) == len(TEXT), "nothing has changed"
    model.weight.data.add_(1)
    world.gets_pages(again, range(10, 17), len(TEXT))
    world.step()
    assert (world.loaded, world.failed) == ({"again"}, set(range(10, 16)))
    assert world.half.manager.cache.usage()[HOST].num_used == 0
    world.serve("other", TEXT[::-1], range(18, 24))
    model.weight.data.add_(1)
    more = world.request("more", TEXT)
    world.asks(more)
    world.step((more, range(6), len(TEXT)))
    assert world.half.manager.cache.usage()[HOST].num_used == 0, "nor is what was being stored"
    world.serve("last", TEXT, range(6))
    assert world.asks(world.request("found", TEXT + "s")) == len(TEXT)
    assert world.half.manager.num_new_weights == 2


def test_full_host_memory_stores_what_it_can_later(make: Callable[..., KvWorld]) -> None:
    world = make(num_slots=4)
    world.serve("first", TEXT[: 4 * PAGE], range(4))
    held = world.request("held", TEXT[: 4 * PAGE] + "s")
    assert world.asks(held) == 4 * PAGE
    world.gets_pages(held, range(10, 15), 4 * PAGE)
    other = world.request("other", TEXT[::-1])
    assert world.asks(other) == 0
    message = world.message((other, range(16, 22), len(TEXT)))
    assert (len(message.loads), len(message.stores)) == (1, 0), "every slot is held"
    world.run(message)
    other.num_computed_tokens = len(TEXT)
    other.num_tokens = len(TEXT) + 1
    keeps = world.half.finish(other, range(16, 22))
    world.step()
    assert keeps is bool(world.stored)


def test_requests_of_a_step_are_stored_by_one_call_each_block_once(
    make: Callable[..., KvWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    calls: list[int] = []
    cache = world.half.manager.cache
    reserve = cache.reserve

    def noted(keys: Collection[bytes]) -> Reserved | None:
        calls.append(len(keys))
        return reserve(keys)

    monkeypatch.setattr(cache, "reserve", noted)
    requests = [world.request("first", TEXT), world.request("second", TEXT[:12] + "another one")]
    world.fill(range(12), seed=1)
    for cached in world.caches:  # the same three blocks begin both prompts
        for layer in cached.values():
            layer[:, 6:9] = layer[:, 0:3]
    before = world.bytes_of(range(6)), world.bytes_of(range(6, 11))
    scheduled = []
    for request, pages in zip(requests, (range(6), range(6, 12)), strict=True):
        assert world.asks(request) == 0
        world.gets_pages(request, pages)
        scheduled.append((request, pages, request.num_tokens))
    world.step(*scheduled)
    assert calls == [6 + 5]
    assert cache.usage()[HOST].num_used == 6 + 2
    for request, right in zip(requests, before, strict=True):
        world.half.finish(request, [])
        pages = range(12, 12 + len(right[0][0]))
        again = world.request(f"{request.request_id} again", "")
        again.block_hashes, again.num_tokens = request.block_hashes, request.num_tokens + 1
        assert world.asks(again) == len(pages) * PAGE
        world.gets_pages(again, [*pages, 20], len(pages) * PAGE)
        world.step()
        assert _are_equal(world.bytes_of(pages), right)
        world.half.finish(again, [])


def test_requests_of_a_step_that_have_no_room_together_are_stored_as_far_as_there_is(
    make: Callable[..., KvWorld],
) -> None:
    world = make(num_slots=8)
    requests = [world.request("first", TEXT), world.request("second", TEXT[::-1])]
    for request, pages in zip(requests, (range(6), range(6, 12)), strict=True):
        assert world.asks(request) == 0
        world.gets_pages(request, pages)
    message = world.message(*((request, range(6), len(TEXT)) for request in requests))
    assert [len(job.pages[0].pages) for job in message.stores] == [6]
    world.run(message)
    assert world.asks(world.request("again", TEXT + "s")) == len(TEXT)


def test_hints_of_an_orchestrator_are_followed_and_unknown_ones_counted(
    make: Callable[..., KvWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    heard: list[Hint] = []
    cache = world.half.manager.cache
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
    request = world.request("first", TEXT, kv_hints=envelope)
    world.asks(request)
    world.gets_pages(request, range(6), 0)
    world.step()
    world.half.finish(request, range(6))
    assert heard == [Hint(), Hint(back_in_s=5)]
    counted = world.half.manager.counts.take()
    told = {labels[0]: num for (spec, labels), num in counted.items() if spec is VLLM_HINT_ACTIONS}
    assert told == {"kv.fetch": 1, "kvtier.hint": 1, "unknown": 1}
