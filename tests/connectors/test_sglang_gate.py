"""Requests that wait in SGLang's queue while their KV is loaded into host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.sglang.linker.promotion import PromptPromotion, WaitingPrompt
from kvtier.connectors.sglang.linker.scheduler_hooks import NUM_AHEAD, QueueGate
from kvtier.testing import StoredBlocks
from tests.connectors.pool_harness import SLOT_BYTES, PoolHarness, key_of

PAGE = 16
NUM_STORED = 6
PROMPT = WaitingPrompt(0, 10 * PAGE)


class Harness:
    """A pool whose storage has recovered the blocks 0 to 5.

    A request has the blocks from its number on. now_s: the clock.
    """

    def __init__(self, always: bool = True) -> None:
        stored_blocks = StoredBlocks()
        first = PoolHarness(stored_blocks=stored_blocks)
        assert first.keep(*range(NUM_STORED))
        first.close()
        self.pools = PoolHarness(stored_blocks=stored_blocks)
        self.now_s = 0.0
        self.bringing = PromptPromotion(
            {"kv": self.pools.pool}, PAGE, SLOT_BYTES, always, lambda: self.now_s
        )
        self.gate = QueueGate(self.bringing)
        self.num_looked = 0

    def look(self, rid: str, *numbers: int, prompt: WaitingPrompt = PROMPT) -> list[int]:
        keys = [key_of(number) for number in numbers]
        places = {"kv": self.pools.pool.lookup(keys)[0]}
        return self.bringing.cuts(rid, prompt, keys, places, {"kv": 0})

    def request(self, *numbers: int) -> Any:
        """Return a request that is looked up as SGLang does it."""
        req = SimpleNamespace(rid=f"r{numbers}")

        def init_next_round_input(cache: object, cow_mamba: bool) -> None:
            self.num_looked += 1
            self.look(req.rid, *numbers)

        req.init_next_round_input = init_next_round_input
        return req


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
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


def choose(harness: Harness, made: Any) -> Any:
    return harness.gate.choose(made, False, lambda: take_first(made))


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


def test_nobody_waits_for_longer_than_computing_takes(harness: Harness) -> None:
    harness.pools.storage.hold("get")
    costs = harness.pools.pool.ladder.costs
    for num_tokens in (64, 128, 256, 512):
        costs.observe_prefill(0, num_tokens, num_tokens * 1e-3)
    harness.look("r", *range(NUM_STORED))
    harness.now_s = 0.5 * NUM_STORED * PAGE * 1e-3
    assert harness.bringing.wait("r")
    harness.now_s = 1.5 * NUM_STORED * PAGE * 1e-3
    assert not harness.bringing.wait("r")
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


def test_what_is_slower_than_computing_is_not_brought() -> None:
    harness = Harness(always=False)
    costs = harness.pools.pool.ladder.costs
    for num_tokens in (64, 128, 256, 512):
        costs.observe_prefill(0, num_tokens, num_tokens * 1e-6)
    costs.observe_copy(("disk", "host"), 4096, 10.0)
    costs.observe_copy(("host", "device"), 4096, 1e-9)
    assert harness.look("r", *range(NUM_STORED)) == []
    assert not harness.bringing.wait("r")
    assert harness.pools.storage.num_calls["get"] == 0
    harness.pools.close()


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
    assert choose(harness, made) == [passes.rid]
    assert made.waiting_queue == [waits, last]
    harness.pools.storage.release()
    harness.pools.settle()
    assert choose(harness, made) == [waits.rid]
    assert made.waiting_queue == [last]
    assert harness.num_looked == 3  # each once


def test_rank_waits_as_long_as_another_one_does(harness: Harness) -> None:
    others = [1]
    made = scheduler([harness.request(50)], lambda at: others[at])
    assert choose(harness, made) == []
    assert choose(harness, made) == []
    assert harness.num_looked == 1  # ranks look together: they reduce what they find
    others[0] = 0
    assert choose(harness, made) == ["r(50,)"]


def test_nothing_is_brought_for_who_is_computed_at_once(harness: Harness) -> None:
    made = scheduler([harness.request(50)])
    choose(harness, made)
    assert harness.look("r", 0, 1) == []
    assert not harness.bringing.wait("r")
    assert harness.pools.storage.num_calls["get"] == 0


def test_only_the_head_of_a_long_queue_is_looked_up(harness: Harness) -> None:
    made = scheduler([harness.request(100 + number) for number in range(3 * NUM_AHEAD)])
    choose(harness, made)
    assert harness.num_looked == NUM_AHEAD
    for _ in range(3):
        choose(harness, made)
    assert harness.num_looked == NUM_AHEAD + 3


def test_request_that_went_is_forgotten(harness: Harness) -> None:
    harness.pools.storage.hold("get")
    made = scheduler([harness.request(0, 1)])
    assert choose(harness, made) == []
    made.waiting_queue.clear()
    assert choose(harness, made) == []
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
