"""Requests that wait in SGLang's queue to hear what a store has of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.sglang.linker.promotion import PromptPromotion, WaitingPrompt
from kvtier.connectors.sglang.linker.scheduler_hooks import QueueGate
from kvtier.layout import opaque
from kvtier.plan.decide import WaitState
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts
from tests.connectors.pool_harness import SLOT_BYTES, PoolHarness, key_of
from tests.connectors.test_sglang_gate import PAGE, scheduler, take_first

PATIENCE_S = 30.0


class Harness:
    """A rank whose store has the blocks 0 to 5, from another replica.

    It answers look-ups while ``store.open_finds`` is set.
    """

    def __init__(self, lookup_deadline_s: float = PATIENCE_S) -> None:
        stored_blocks = StoredBlocks()
        first = PoolHarness(stored_blocks=stored_blocks)
        assert first.keep(*range(6))
        first.close()
        facts = StorageFacts(is_shared=True)
        self.store = MemoryStorage(opaque(SLOT_BYTES), 16, stored_blocks, "store", facts)
        self.pools = PoolHarness(storages=[self.store], lookup_deadline_s=lookup_deadline_s)
        self.bringing = PromptPromotion({"kv": self.pools.pool}, PAGE, SLOT_BYTES, always=True)
        self.gate = QueueGate(self.bringing)
        self.cuts: list[list[int]] = []

    def look(self, rid: str, *numbers: int) -> None:
        keys = [key_of(number) for number in numbers]
        places, asked = self.pools.pool.lookup(keys)
        cuts = self.bringing.cuts(
            rid, WaitingPrompt(0, 160), keys, {"kv": places}, {"kv": 0}, asked
        )
        self.cuts.append(cuts)

    def request(self, *numbers: int) -> Any:
        req = SimpleNamespace(rid=f"r{numbers}")
        req.init_next_round_input = lambda cache, cow_mamba: self.look(req.rid, *numbers)
        return req

    def choose(self, made: Any) -> Any:
        self.pools.pool.poll()  # as SGLang has the linker do in each step
        return self.gate.choose(made, False, lambda: take_first(made))

    def until_heard(self) -> None:
        """Wait until the store has answered, and a step has noticed."""
        self.store.open_finds.set()
        end_s = time.monotonic() + PATIENCE_S
        while any(
            visit.wait.state(0.0) is WaitState.ANSWERS for visit in self.bringing._visits.values()
        ):
            assert time.monotonic() < end_s, "nothing is heard"
            self.pools.pool.poll()

    def _await_answers(self) -> bool:
        visits = self.bringing._visits.values()
        return any(visit.wait.state(0.0) is WaitState.ANSWERS for visit in visits)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    made.store.open_finds.clear()
    yield made
    made.store.open_finds.set()
    made.pools.close()


def test_request_waits_for_the_answer_and_then_for_what_comes(harness: Harness) -> None:
    req = harness.request(0, 1, 2, 99)
    made = scheduler([req])
    assert harness.choose(made) == []
    assert harness.bringing.wait(req.rid) is WaitState.ANSWERS
    assert harness.choose(made) == []
    assert harness.cuts == [[]], "it is looked up once while it waits"
    harness.until_heard()
    assert harness.choose(made) == []
    assert harness.choose(made) == []
    assert harness.bringing.wait(req.rid) is WaitState.READS
    harness.pools.settle()
    assert harness.choose(made) == [req.rid]
    harness.look("turn", 0, 1, 2, 99)
    assert harness.cuts == [[], [], [1, 2, 3]]


def test_request_that_the_store_has_nothing_of_is_computed(harness: Harness) -> None:
    req = harness.request(50, 51)
    made = scheduler([req])
    assert harness.choose(made) == []
    harness.until_heard()
    assert harness.choose(made) == []
    assert harness.choose(made) == [req.rid]
    assert harness.cuts == [[], []]


def test_others_pass_meanwhile(harness: Harness) -> None:
    waits, passes = harness.request(0, 1), harness.request()
    made = scheduler([waits, passes])
    assert harness.choose(made) == [passes.rid]
    assert made.waiting_queue == [waits]


def test_ranks_look_again_when_all_have_heard(harness: Harness) -> None:
    """Each look-up is a reduction of SGLang's: all ranks make it in one step, or none does."""
    others = [int(WaitState.ANSWERS)]
    req = harness.request(0, 1)
    made = scheduler([req], lambda at: others[at])
    assert harness.choose(made) == []
    harness.until_heard()
    for _ in range(3):
        assert harness.choose(made) == []
    assert len(harness.cuts) == 1, "this rank has heard, the other one has not"
    others[0] = 0
    assert harness.choose(made) == []
    assert harness.choose(made) == []
    assert len(harness.cuts) == 2
    harness.pools.settle()
    assert harness.choose(made) == [req.rid]


def test_rank_that_asked_nobody_looks_again_with_the_others(harness: Harness) -> None:
    others = [int(WaitState.ANSWERS)]
    req = harness.request()
    made = scheduler([req], lambda at: others[at])
    assert harness.choose(made) == []
    others[0] = 0
    assert harness.choose(made) == []
    assert len(harness.cuts) == 1
    assert harness.choose(made) == [req.rid]
    assert len(harness.cuts) == 2


def test_nobody_waits_for_longer_than_for_an_answer() -> None:
    harness = Harness(lookup_deadline_s=0.05)
    harness.store.open_finds.clear()
    first, second = harness.request(0, 1), harness.request(2, 3)
    made = scheduler([first])
    end_s = time.monotonic() + PATIENCE_S
    while harness.choose(made) == []:
        assert time.monotonic() < end_s, "it waits for ever"
    made = scheduler([second])
    assert harness.choose(made) == [second.rid], "others wait for a store that is late"
    harness.store.open_finds.set()
    harness.pools.close()


def test_log_has_once_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvtier.connectors.sglang.linker.promotion")
    pools = PoolHarness()
    assert pools.keep(0, 1)
    bringing = PromptPromotion({"kv": pools.pool}, PAGE, SLOT_BYTES, always=False)
    keys = [key_of(0), key_of(1)]
    places = {"kv": pools.pool.lookup(keys)[0]}
    for _ in range(3):
        bringing.cuts("again\nforged", WaitingPrompt(0, 3 * PAGE), keys, places, {"kv": 0})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(rf"prompt request=again\nforged tokens={3 * PAGE} reused={2 * PAGE} ")
    pools.close()
