"""Reports to a policy that learns, under SGLang, and cases without one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.sglang.shared.prompt_reporting import PromptReporter, policy_of
from kvtier.connectors.sglang.shared.settings import StorageSettings
from kvtier.core.errors import ConfigError
from kvtier.index.policies.replayed import LRU, RUNS
from tests.connectors.pool_harness import PoolHarness

PAGE = 16
DISK = {"disk_path": "/nvme/kv", "disk_capacity": "1MiB"}


class Request:
    """Request of SGLang."""


def key(number: int) -> str:
    return f"{number:064x}"


def page(number: int) -> bytes:
    return number.to_bytes(32, "big")


def run_batch(run: Callable[..., Any], *rest: Any) -> Any:
    return run(*rest)


class Told:
    """Prompts and links between blocks that are reported to the cache of ``pools``."""

    def __init__(self, pools: PoolHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[int]] = []
        self.behind: list[tuple[list[int], int]] = []
        self.fails = False
        self.asking = PromptReporter([pools.pool], PAGE)
        monkeypatch.setattr(pools.pool, "on_request", self._asked)
        monkeypatch.setattr(pools.pool, "continues", self._continues)

    def _asked(self, keys: Sequence[bytes]) -> None:
        if self.fails:
            raise RuntimeError("it is told to")
        self.asked.append([int.from_bytes(each, "big") for each in keys])

    def _continues(self, keys: Sequence[bytes], before: bytes) -> None:
        numbers = [int.from_bytes(each, "big") for each in keys]
        self.behind.append((numbers, int.from_bytes(before, "big")))

    def look_up(self, req: Request, before: Sequence[int], after: Sequence[int]) -> None:
        """Look a prompt up as SGLang does: without a storage query if no whole page is left."""
        keys = [key(number) for number in before]
        with self.asking.looking_up(req, len(before) * PAGE, lambda: keys):
            if after:
                self.asking.look_up([page(number) for number in after])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    pools = PoolHarness(policy=RUNS)
    yield Told(pools, monkeypatch)
    pools.close()


def test_a_request_is_told_of_once_with_all_of_its_prompt(told: Told) -> None:
    first, second = Request(), Request()
    for _ in range(3):
        told.look_up(first, [1, 2], [3, 4])
    told.look_up(second, [], [1, 2])
    told.look_up(first, [1, 2, 3, 4], [5])  # it was retracted, and comes again
    assert told.asked == [[1, 2, 3, 4], [1, 2]]


def test_what_the_device_has_all_of_is_told_of_too(told: Told) -> None:
    told.look_up(Request(), [1, 2, 3], [])
    assert told.asked == [[1, 2, 3]]


def test_requests_that_have_gone_are_forgotten(told: Told) -> None:
    for number in range(50):
        told.look_up(Request(), [], [number])
    gc.collect()
    assert not told.asking._told
    assert len(told.asked) == 50


def test_what_is_not_hashed_is_not_told_of_until_it_is(told: Told) -> None:
    req = Request()
    with told.asking.looking_up(req, 3 * PAGE, lambda: [key(1)]):
        told.asking.look_up([page(4)])
    assert told.asked == []
    told.look_up(req, [1, 2, 3], [4])
    assert told.asked == [[1, 2, 3, 4]]


def test_pages_that_nobody_asked_for_come_behind_those_in_front(told: Told) -> None:
    told.asking.note_node(lambda: key(9))
    told.asking.store([page(1), page(2), page(3)], {page(1)})
    told.asking.note_node(lambda: key(3))
    told.asking.store([page(4)], ())
    told.asking.note_node(lambda: None)  # the beginning of a prompt
    told.asking.store([page(7)], ())
    told.asking.store([page(8)], ())  # the blocks before it were not reported
    told.asking.store([page(5)], {page(5)})
    assert told.behind == [([2, 3], 1), ([4], 3)]


def test_a_failure_is_logged_and_nothing_else(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.fails = True
    told.look_up(Request(), [], [1])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    told.asking.note_node(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    told.asking.store([page(4)], ())
    assert len(caplog.records) == 2


def test_nothing_is_walked_where_nothing_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = PoolHarness()
    told = Told(pools, monkeypatch)
    told.look_up(Request(), [1], [2])
    told.asking.note_node(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    told.asking.store([page(4)], ())
    assert (told.asked, told.behind) == ([], [])
    pools.close()


def test_one_place_decides_who_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings.read(DISK)
    name = f"{__name__}.run_batch"

    def hook(*rest: Any) -> Any:
        return rest

    def hooked(*rest: Any) -> Any:
        return hook(*rest)

    assert policy_of(settings, None, {}) == LRU, "an older SGLang"
    assert policy_of(settings, None, {name: hook}) == LRU, "the hook did not take"
    monkeypatch.setattr(f"{__name__}.run_batch", hooked)
    assert policy_of(settings, None, {name: hook}) == RUNS
    decode = SimpleNamespace(disaggregation_mode="decode")
    assert policy_of(settings, decode, {name: hook}) == LRU
    lru = StorageSettings.read({**DISK, "eviction_policy": LRU})
    assert policy_of(lru, None, {name: hook}) == LRU
    with pytest.raises(ConfigError, match="'fifo'; use one of runs, lru, arc"):
        StorageSettings.read({**DISK, "eviction_policy": "fifo"})
