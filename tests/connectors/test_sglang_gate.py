"""Requests that wait in SGLang's queue for answers of a store, and for KV on its way to memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.sglang.linker.promotion import PromptPromotion, WaitingPrompt
from kvtier.connectors.sglang.linker.scheduler_hooks import NUM_AHEAD, QueueGate
from kvtier.layout import opaque
from kvtier.plan.decide import WaitState
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts
from tests.connectors.pool_harness import SLOT_BYTES, PoolHarness, key_of

PAGE = 16
NUM_STORED = 6
PROMPT = WaitingPrompt(0, 10 * PAGE)
PATIENCE_S = 30.0


class Harness:
    """A rank whose storage has the blocks 0 to 5, recovered by it or stored by another replica.

    A request has the blocks from its number on.

    Args:
        pools: its caches.
        now_s: the clock; None for the real time.
    """

    def __init__(self, pools: PoolHarness, now_s: float | None = None) -> None:
        self.pools = pools
        self.now_s = now_s
        self.bringing = PromptPromotion({"kv": pools.pool}, PAGE, SLOT_BYTES, True, self._clock)
        self.gate = QueueGate(self.bringing)
        self.cuts: list[list[int]] = []

    def _clock(self) -> float:
        return time.monotonic() if self.now_s is None else self.now_s

    def look(self, rid: str, *numbers: int) -> list[int]:
        keys = [key_of(number) for number in numbers]
        places, answers = self.pools.pool.lookup(keys)
        cuts = self.bringing.cuts(rid, PROMPT, keys, {"kv": places}, {"kv": 0}, answers)
        self.cuts.append(cuts)
        return cuts

    def request(self, *numbers: int) -> Any:
        """Return a request that is looked up as SGLang does it."""
        req = SimpleNamespace(rid=f"r{numbers}")
        req.init_next_round_input = lambda cache, cow_mamba: self.look(req.rid, *numbers)
        return req

    def choose(self, made: Any) -> Any:
        self.pools.pool.poll()  # as SGLang has the linker do in each step
        return self.gate.choose(made, False, lambda: take_first(made))


def stored() -> StoredBlocks:
    """Return the content of a storage that has the blocks 0 to 5."""
    stored_blocks = StoredBlocks()
    first = PoolHarness(stored_blocks=stored_blocks)
    assert first.keep(*range(NUM_STORED))
    first.close()
    return stored_blocks


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(PoolHarness(stored_blocks=stored()), now_s=0.0)
    yield made
    made.pools.close()


class StoreHarness(Harness):
    """Its storage is a store, which answers look-ups while ``store.open_finds`` is set."""

    def __init__(self, lookup_deadline_s: float = PATIENCE_S) -> None:
        facts = StorageFacts(is_shared=True)
        self.store = MemoryStorage(opaque(SLOT_BYTES), 16, stored(), "store", facts)
        self.store.open_finds.clear()
        super().__init__(PoolHarness(storages=[self.store], lookup_deadline_s=lookup_deadline_s))

    def until_heard(self) -> None:
        """Wait until the store has answered, and a step has noticed."""
        self.store.open_finds.set()
        end_s = time.monotonic() + PATIENCE_S
        states = self.bringing._states
        while any(self.bringing.wait(rid) is WaitState.ANSWERS for rid in states):
            assert time.monotonic() < end_s, "nothing is heard"
            self.pools.pool.poll()


@pytest.fixture
def store() -> Iterator[StoreHarness]:
    made = StoreHarness()
    yield made
    made.store.open_finds.set()
    made.pools.close()


def scheduler(queue: Sequence[Any], others: Callable[[int], int] = lambda at: 0) -> Any:
    """Return a stand-in for SGLang's scheduler.

    others: value that another rank contributes at each position of the reduction.
    """

    def reduce(tensor: torch.Tensor, op: object) -> None:
        assert op is torch.distributed.ReduceOp.MAX
        for at in range(len(tensor)):
            tensor[at] = max(int(tensor[at]), others(at))

    cache = SimpleNamespace(_all_reduce_attn_groups=reduce)
    return SimpleNamespace(waiting_queue=list(queue), tree_cache=cache)


def take_first(made: Any) -> Any:
    """Compute the first request in the queue, as SGLang does."""
    taken, made.waiting_queue = made.waiting_queue[:1], made.waiting_queue[1:]
    return [req.rid for req in taken]


# -- what is brought ------------------------------------------------------------------------------


def test_first_look_brings_and_a_later_one_tells(harness: Harness) -> None:
    assert harness.look("r", 0, 1, 2, 99) == []
    assert harness.bringing.wait("r")
    harness.pools.settle()
    assert not harness.bringing.wait("r")
    assert harness.look("r", 0, 1, 2, 99) == [1, 2, 3]


def test_what_is_in_memory_is_told_of_while_the_rest_comes(harness: Harness) -> None:
    assert harness.look("a", 0, 1) == []
    harness.pools.settle()
    harness.pools.storage.hold("get")
    assert harness.look("b", 0, 1, 2, 3) == [1, 2]
    assert harness.bringing.wait("b")
    harness.pools.storage.release()


def test_read_that_fails_ends_the_wait_and_is_not_begun_again(harness: Harness) -> None:
    harness.pools.storage.fail("get")
    harness.look("r", 0, 1)
    harness.pools.settle()
    assert not harness.bringing.wait("r")
    num_reads = harness.pools.storage.num_calls["get"]
    assert harness.look("r", 0, 1) == []
    harness.pools.settle()
    assert not harness.bringing.wait("r")
    assert harness.pools.storage.num_calls["get"] == num_reads


def test_window_needs_only_what_lies_before_the_cut() -> None:
    """A pool with a window needs its last two blocks before the cut, the other pool needs all."""
    full, window = PoolHarness(), PoolHarness()
    assert full.keep(0, 1, 2, 3)
    assert window.keep(2, 3)
    caches = {"kv": full.pool, "swa": window.pool}
    keys = [key_of(number) for number in range(5)]
    places = {name: cache.locate_all(keys) for name, cache in caches.items()}
    assert places["swa"][:2] == [BlockState.NOWHERE] * 2
    bringing = PromptPromotion(caches, PAGE, SLOT_BYTES, always=True)
    assert bringing.cuts("r", PROMPT, keys, places, {"kv": 0, "swa": 2}) == [4]
    assert bringing.cuts("r", PROMPT, keys, places, {"kv": 0, "swa": 1}) == [3, 4]
    full.close()
    window.close()


# -- who waits ------------------------------------------------------------------------------------


def test_request_whose_kv_comes_lets_others_pass_and_keeps_its_place(harness: Harness) -> None:
    harness.pools.storage.hold("get")
    waits, passes, last = harness.request(0, 1), harness.request(50), harness.request(60)
    made = scheduler([waits, passes, last])
    assert harness.choose(made) == [passes.rid]
    assert made.waiting_queue == [waits, last]
    harness.pools.storage.release()
    harness.pools.settle()
    assert harness.choose(made) == [waits.rid]
    assert made.waiting_queue == [last]
    assert len(harness.cuts) == 3  # each once


def test_rank_waits_as_long_as_another_one_does(harness: Harness) -> None:
    others = [1]
    made = scheduler([harness.request(50)], lambda at: others[at])
    assert harness.choose(made) == []
    assert harness.choose(made) == []
    assert len(harness.cuts) == 1  # ranks look together: they reduce what they find
    others[0] = 0
    assert harness.choose(made) == ["r(50,)"]


def test_nothing_is_brought_for_who_is_computed_at_once(harness: Harness) -> None:
    made = scheduler([harness.request(50)])
    harness.choose(made)
    assert harness.look("r", 0, 1) == []
    assert not harness.bringing.wait("r")
    assert harness.pools.storage.num_calls["get"] == 0


def test_only_the_head_of_a_long_queue_is_looked_up(harness: Harness) -> None:
    made = scheduler([harness.request(100 + number) for number in range(3 * NUM_AHEAD)])
    harness.choose(made)
    assert len(harness.cuts) == NUM_AHEAD
    for _ in range(3):
        harness.choose(made)
    assert len(harness.cuts) == NUM_AHEAD + 3


def test_request_that_went_is_forgotten(harness: Harness) -> None:
    harness.pools.storage.hold("get")
    made = scheduler([harness.request(0, 1)])
    assert harness.choose(made) == []
    made.waiting_queue.clear()
    assert harness.choose(made) == []
    assert not harness.bringing.wait("r(0, 1)")
    harness.pools.storage.release()


def test_choice_that_fails_loses_no_request(harness: Harness) -> None:
    harness.pools.storage.hold("get")
    queue = [harness.request(0, 1), harness.request(50)]
    made = scheduler(queue)

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        harness.gate.choose(made, False, fail)
    assert made.waiting_queue == queue
    harness.pools.storage.release()


# -- look-ups in a store -------------------------------------------------------------------------


def test_request_waits_for_the_answer_and_then_for_what_comes(store: StoreHarness) -> None:
    req = store.request(0, 1, 2, 99)
    made = scheduler([req])
    assert store.choose(made) == []
    assert store.bringing.wait(req.rid) is WaitState.ANSWERS
    assert store.choose(made) == []
    assert store.cuts == [[]], "it is looked up once while it waits"
    store.until_heard()
    assert store.choose(made) == []
    assert store.choose(made) == []
    assert store.bringing.wait(req.rid) is WaitState.READS
    store.pools.settle()
    assert store.choose(made) == [req.rid]
    store.look("turn", 0, 1, 2, 99)
    assert store.cuts == [[], [], [1, 2, 3]]


def test_request_that_the_store_has_nothing_of_is_computed(store: StoreHarness) -> None:
    req = store.request(50, 51)
    made = scheduler([req])
    assert store.choose(made) == []
    store.until_heard()
    assert store.choose(made) == []
    assert store.choose(made) == [req.rid]
    assert store.cuts == [[], []]


def test_others_pass_meanwhile(store: StoreHarness) -> None:
    waits, passes = store.request(0, 1), store.request()
    made = scheduler([waits, passes])
    assert store.choose(made) == [passes.rid]
    assert made.waiting_queue == [waits]


def test_ranks_look_again_when_all_have_heard(store: StoreHarness) -> None:
    """Each look-up is a reduction of SGLang's: all ranks make it in one step, or none does."""
    others = [int(WaitState.ANSWERS)]
    req = store.request(0, 1)
    made = scheduler([req], lambda at: others[at])
    assert store.choose(made) == []
    store.until_heard()
    for _ in range(3):
        assert store.choose(made) == []
    assert len(store.cuts) == 1, "this rank has heard, the other one has not"
    others[0] = 0
    assert store.choose(made) == []
    assert store.choose(made) == []
    assert len(store.cuts) == 2
    store.pools.settle()
    assert store.choose(made) == [req.rid]


def test_rank_that_asked_nobody_looks_again_with_the_others(store: StoreHarness) -> None:
    others = [int(WaitState.ANSWERS)]
    req = store.request()
    made = scheduler([req], lambda at: others[at])
    assert store.choose(made) == []
    others[0] = 0
    assert store.choose(made) == []
    assert len(store.cuts) == 1
    assert store.choose(made) == [req.rid]
    assert len(store.cuts) == 2


def test_nobody_waits_for_longer_than_for_an_answer() -> None:
    store = StoreHarness(lookup_deadline_s=0.05)
    first, second = store.request(0, 1), store.request(2, 3)
    made = scheduler([first])
    end_s = time.monotonic() + PATIENCE_S
    while store.choose(made) == []:
        assert time.monotonic() < end_s, "it waits for ever"
    made = scheduler([second])
    assert store.choose(made) == [second.rid], "others wait for a store that is late"
    store.store.open_finds.set()
    store.pools.close()


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
