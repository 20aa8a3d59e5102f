"""Requests in vLLM's queue are reported as upcoming uses of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key

from kvtier.connectors.vllm.shared import step as step_module
from kvtier.connectors.vllm.shared.step import QueuedRequests
from tests.engines.vllm.test_manager import KEYS, Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Told:
    """Reports by the first hash of a prompt."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[OffloadKey], bool]] = []
        self.waiting = QueuedRequests(2, 0, self.note)

    def note(self, keys: Sequence[OffloadKey], is_waiting: bool) -> None:
        self.calls.append((list(keys), is_waiting))

    def take(self) -> list[tuple[list[OffloadKey], bool]]:
        calls, self.calls = self.calls, []
        return calls


def request(name: str, numbers: Sequence[int]) -> Request:
    hashes = [bytes([number]) * 32 for number in numbers]
    return cast("Request", SimpleNamespace(request_id=name, block_hashes=hashes))


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def test_who_had_no_turn_waits_from_then_on_until_it_has() -> None:
    told = Told()
    told.waiting.on_queued(request("at once", (1, 2)))
    told.waiting.on_queued(request("later", (1, 2, 3, 4, 5)))
    told.waiting.on_dequeued("at once")
    told.waiting.end_step()
    assert told.take() == [(keys(2, 4), True)], "a block has two hashes, and the fifth is of none"
    told.waiting.end_step()
    assert told.take() == [], "once"
    told.waiting.on_dequeued("later")
    told.waiting.on_dequeued("later")
    assert told.take() == [(keys(2, 4), False)]


def test_a_burst_is_told_of_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "MAX_BLOCKS", 3)
    told = Told()
    told.waiting.on_queued(request("long", range(12)))
    for number in range(5):
        told.waiting.on_queued(request(str(number), (0, number)))
    told.waiting.end_step()
    assert told.take() == [(keys(1, 3, 5), True)], "its beginning"
    told.waiting.end_step()
    assert [keys for keys, _ in told.take()] == [keys(0), keys(1), keys(2)]
    told.waiting.on_dequeued("3")
    told.waiting.end_step()
    assert told.take() == [(keys(4), True)]


@pytest.mark.parametrize(("waits", "found"), [(False, 0), (True, 2)])
def test_what_a_waiting_request_will_need_outlasts_a_flood(waits: bool, found: int) -> None:
    scheduler = Scheduler(num_host=4, num_disk=0)
    first = scheduler.request("first", KEYS[:2])
    scheduler.store(first, KEYS[:2])
    scheduler.manager.on_request_finished(first)
    queue = QueuedRequests(1, 0, scheduler.manager.cache.wait)
    if waits:
        queue.on_queued(request("waits", (0, 1)))
    queue.end_step()
    for at in (2, 4, 6):
        other = scheduler.request(f"other {at}", KEYS[at : at + 2])
        scheduler.store(other, KEYS[at : at + 2])
        scheduler.manager.on_request_finished(other)
    again = scheduler.request("waits", KEYS[:2])
    assert scheduler.look_up(again, KEYS[:2]).count(LookupResult.HIT) == found
    queue.on_dequeued("waits")
    scheduler.manager.cache.check_invariants()
