"""Requests in vLLM's queue are reported as upcoming uses of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key

from kvtier.connectors.vllm.shared import step as step_module
from kvtier.connectors.vllm.shared.step import QueuedRequests
from tests.engines.vllm.test_manager import KEYS, Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request


Reports = list[tuple[list[OffloadKey], bool]]


def queue() -> tuple[QueuedRequests, Reports]:
    """Return a queue with two hashes per block, and what it reports."""
    reports: Reports = []
    return QueuedRequests(2, 0, lambda keys, waits: reports.append((list(keys), waits))), reports


def request(name: str, numbers: Sequence[int]) -> Request:
    hashes = [bytes([number]) * 32 for number in numbers]
    return cast("Request", SimpleNamespace(request_id=name, block_hashes=hashes))


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def test_who_had_no_turn_waits_from_then_on_until_it_has() -> None:
    waiting, reports = queue()
    waiting.on_queued(request("at once", (1, 2)))
    waiting.on_queued(request("later", (1, 2, 3, 4, 5)))
    waiting.on_dequeued("at once")
    waiting.end_step()
    assert reports == [(keys(2, 4), True)], "a block has two hashes, and the fifth is of none"
    waiting.end_step()
    assert len(reports) == 1, "once"
    waiting.on_dequeued("later")
    waiting.on_dequeued("later")
    assert reports[1:] == [(keys(2, 4), False)]


def test_a_burst_is_told_of_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "MAX_BLOCKS", 3)
    waiting, reports = queue()
    waiting.on_queued(request("long", range(12)))
    for number in range(5):
        waiting.on_queued(request(str(number), (0, number)))
    waiting.end_step()
    assert reports == [(keys(1, 3, 5), True)], "its beginning"
    waiting.end_step()
    assert reports[1:] == [(keys(number), True) for number in range(3)]
    waiting.on_dequeued("3")
    waiting.end_step()
    assert reports[4:] == [(keys(4), True)]


@pytest.mark.parametrize(("waits", "found"), [(False, 0), (True, 2)])
def test_what_a_waiting_request_will_need_outlasts_a_flood(waits: bool, found: int) -> None:
    scheduler = Scheduler(num_host=4, num_disk=0)
    scheduler.serve("first", KEYS[:2])
    waiting = QueuedRequests(1, 0, scheduler.manager.cache.wait)
    if waits:
        waiting.on_queued(request("waits", (0, 1)))
    waiting.end_step()
    for at in (2, 4, 6):
        scheduler.serve(f"other {at}", KEYS[at : at + 2])
    again = scheduler.request("waits", KEYS[:2])
    assert scheduler.look_up(again, KEYS[:2]).count(LookupResult.HIT) == found
    waiting.on_dequeued("waits")
    scheduler.manager.cache.check_invariants()
