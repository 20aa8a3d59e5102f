"""Every connector translates the same decision: one table of cases, real caches below.

A case is queried as its engine does: again when the request has waited, and once more when
everything that it waited for has arrived.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier import connectors
from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import Ladder
from kvtier.cache.transfer.ranks import Done, RankOrder, Verb
from kvtier.cache.transfer.ranks.digests import keys_in
from kvtier.connectors.sglang.linker.promotion import PromptPromotion, WaitingPrompt
from kvtier.connectors.sglang.shared.ranks import KV
from kvtier.connectors.vllm.shared.counts import Counts
from kvtier.connectors.vllm.shared.promotion import Promotion
from kvtier.connectors.vllm.shared.prompt import RequestBlocks, Shape
from kvtier.connectors.vllm.shared.request_state import Advice, RequestState
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.layout import opaque
from kvtier.observe.specs import VLLM_RECOMPUTED_CHUNKS
from kvtier.plan.decide import WaitState
from kvtier.testing import FaultyStorage, MemoryStorage, StoredBlocks
from kvtier.tiers import StorageFacts
from tests.cache import keyed_harness
from tests.connectors import pool_harness
from tests.connectors.pool_harness import SLOT_BYTES, PoolHarness
from tests.connectors.storage_harness import BLOCK_BYTES, memory
from tests.connectors.test_blocking_calls import Caller
from tests.connectors.test_blocking_calls import key_of as slab_key_of
from tests.plan.decide_cases import BLOCK_TOKENS, CASES, WAITS, Case, WaitCase

STORE = "store"
PATIENCE_S = 30.0
LONG_S = 20.0
"""Longer than any request waits."""
NUM_TOKENS = 1
"""Tokens of a prompt behind its last block."""


class Answer(NamedTuple):
    """Decision of a connector.

    loads: number of blocks that the engine has to load. waits: the request has to wait.
    """

    loads: int = 0
    waits: bool = False


WAITING = Answer(waits=True)
Ask = Callable[[], Answer]


def learn(ladder: Ladder, case: Case, num_bytes: int, storage: str = DISK) -> None:
    ladder.costs.observe_copy((HOST, DEVICE), num_bytes, case.load_s)
    ladder.costs.observe_copy((storage, HOST), num_bytes, case.promote_s)
    for num in (4, 8, 16, 32) if case.computes_s is not None else ():
        ladder.costs.observe_prefill(0, num * BLOCK_TOKENS, num * case.computes_s)


# -- vLLM ------------------------------------------------------------------------------------------


class UnderVllm:
    """A request under vLLM, whose scheduler's steps the test makes."""

    def __init__(self, case: Case) -> None:
        self.now_s = 100.0
        self._case = case
        self._keys = keyed_harness.KEYS[: len(case.behind)]
        by_place: dict[str, list[Any]] = {letter: [] for letter in "MSAU."} | self._by_place()
        engine = keyed_harness.Engine(
            num_host=16,
            says_hello=False,
            stores=[STORE] if by_place["U"] else (),
            clock=lambda: self.now_s,
        )
        self._engine, cache = engine, engine.cache
        engine.hello(0, *map(keyed_harness.name, by_place["S"] + by_place["A"]))
        if by_place["M"]:
            engine.store(by_place["M"])
        engine.carry_out()
        if by_place["A"]:
            cache.adopt(by_place["A"])
            assert cache.promote(by_place["A"]) == len(by_place["A"])
        self.counts = Counts()
        learn(engine.ladder, case, keyed_harness.BLOCK_BYTES)
        self._promotion = Promotion(
            cache,
            cache.direct_reads,
            Shape((BLOCK_TOKENS,), keyed_harness.BLOCK_BYTES),
            LoadPolicy.ALWAYS if case.always_loads else LoadPolicy.AUTO,
            lambda: True,
            self.counts,
            lambda: self.now_s,
        )
        self._first = case.num_device * BLOCK_TOKENS
        ends = {key: self._end(at + 1) for at, key in enumerate(self._keys)}
        self._state = RequestState(RequestBlocks("r", ends))

    def _by_place(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for letter, key in zip(self._case.behind, self._keys, strict=True):
            found.setdefault(letter, []).append(key)
        return found

    def _end(self, num_blocks: int) -> int:
        return self._first + num_blocks * BLOCK_TOKENS

    def ask(self) -> Answer:
        """Decide as ``KvtierOffloadingConnector.get_num_new_matched_tokens`` does."""
        num_tokens = self._end(len(self._keys)) + NUM_TOKENS
        if self._promotion.must_wait(self._state, self._first):
            return WAITING
        for _ in range(10):
            found = self._look_up()
            if found is None:
                advice = self._promotion.advise(self._state, self._first, num_tokens)
                if advice is Advice.WAIT:
                    return WAITING
                if advice is Advice.COMPUTE:
                    return Answer()
            elif not found:
                return Answer()
            else:
                worth = self._promotion.num_worth_loading(
                    self._state, self._first, found, num_tokens
                )
                return Answer(worth // BLOCK_TOKENS)
        raise AssertionError("it looks again for ever")

    def _look_up(self) -> int | None:
        """Look a prefix up as vLLM does, with the answers of ``TierManager.find``."""
        state, num, is_pending = self._state, 0, self.waits_for is not None
        state.begin_look_up(self._first)
        if self.waits_for == "its own copies":
            return None
        places, state.lookup.answers = self._engine.cache.lookup(self._keys)
        for key, at in zip(self._keys, places, strict=True):
            end = state.request.ends.get(key, 0)
            if end > state.limit:
                break
            if state.given_up is not None and at is not BlockState.MEMORY:
                break
            state.lookup.met[key] = at
            if at is BlockState.NOWHERE:
                break
            is_pending |= at is not BlockState.MEMORY
            num += 1
        return None if is_pending else num * BLOCK_TOKENS

    def happen(self, event: str) -> None:
        """See ``WaitCase``."""
        if event == "t":
            self.now_s += LONG_S
            return
        self._orders = [*self._orders, *self._engine.mover.take_orders()]
        verb = Verb.FIND if event == "a" else Verb.READ
        for order in [order for order in self._orders if order.verb is verb]:
            num = len(keys_in(order.keys)) if event == "a" else len(order.names)
            missing = frozenset() if event == "r" else frozenset(range(num))
            self._engine.finish(order, Done(missing, missing if event == "a" else frozenset()))
            self._orders.remove(order)

    _orders: Sequence[RankOrder] = ()
    waits_for: str | None = None
    """Copies that vLLM delays the request for; None for none."""

    def load_ended(self) -> None:
        self._promotion.load_ended()

    def state(self) -> WaitState:
        """Return the state of the wait. vLLM sees only whether the request waits."""
        wait, now_s = self._state.wait, self.now_s
        assert wait is not None
        state = wait.state(now_s)
        assert self._promotion.must_wait(self._state, self._first) == (state is not WaitState.OVER)
        return state

    def ask_for_window(self, num_blocks: int) -> int:
        """Return the number of tokens worth loading, where only the last blocks are needed."""
        self._state.begin_look_up(self._first)
        self._state.lookup.met = dict.fromkeys(
            reversed(self._keys[-num_blocks:]), BlockState.MEMORY
        )
        end = self._end(len(self._keys))
        return self._promotion.num_worth_loading(self._state, self._first, end, end + NUM_TOKENS)

    def advise_on(self, place: BlockState, end: int) -> list[Advice]:
        """Return the advice on a block that ends there, however often vLLM looks it up."""
        self._state.lookup.met = {self._keys[0]: place}
        self._state.request.ends = dict.fromkeys(self._keys, end)
        return [self._promotion.advise(self._state, self._first, 4 * end) for _ in range(3)]

    def arrive(self) -> None:
        num = self._case.blocks.count("S") if self._case.has_failed else 0
        self._engine.carry_out(failed=range(num))

    def close(self) -> None:
        self._engine.check()


def test_vllm_counts_no_block_that_is_nowhere_as_recomputed() -> None:
    """The miss that ends a look-up is no block that could have been loaded."""
    made = UnderVllm(Case("", "MM..", load_s=1.0))
    assert made.ask() == Answer()
    assert made.counts.take() == {(VLLM_RECOMPUTED_CHUNKS, ()): 2}


def test_vllm_loads_a_window_whole_or_not_at_all() -> None:
    """vLLM looks up the window from its end, for a model whose only group is a sliding window."""
    for load_s, worth in ((0.001, 4 * BLOCK_TOKENS), (1.0, 0)):
        made = UnderVllm(Case("", "MMMM", load_s=load_s))
        assert made.ask_for_window(2) == worth


def test_vllm_does_not_look_for_ever_at_blocks_that_the_device_has() -> None:
    made = UnderVllm(Case("", "DDA"))
    advice = made.advise_on(BlockState.ARRIVING, end=BLOCK_TOKENS)
    assert advice == [Advice.LOOK_AGAIN, Advice.LOOK_AGAIN, Advice.COMPUTE]


@pytest.mark.parametrize("what", ["another's load", "its own copies"])
def test_vllm_has_a_request_wait_for_a_copy_of_vllms_no_longer_than_computing_takes(
    what: str,
) -> None:
    """vLLM loads no block twice at a time, and nothing for a request whose blocks it stores."""
    for is_late in (False, True):
        made = UnderVllm(Case("", "MMMM"))
        made.waits_for = what
        assert made.ask() == made.ask() == WAITING
        if is_late:
            made.happen("t")
            assert made.ask() == Answer()
        else:
            made.waits_for = None
            made.load_ended()
            assert made.ask() == Answer(4)


# -- SGLang ----------------------------------------------------------------------------------------


class UnderSglang:
    """A request under SGLang's linker: looked up while it waits in the queue, and at its turn."""

    def __init__(self, case: Case) -> None:
        self.now_s = 100.0
        numbers = range(len(case.behind))
        place = dict(zip(numbers, case.behind, strict=True))
        self._keys = [pool_harness.key_of(number) for number in numbers]
        stored_blocks = StoredBlocks()
        earlier = PoolHarness(stored_blocks=stored_blocks)
        assert earlier.keep(*(at for at in numbers if place[at] in "SAU"))
        earlier.close()
        self._store: MemoryStorage | None = None
        if "U" in case.blocks:  # a store that has answered for some of the blocks
            facts = StorageFacts(is_shared=True)
            self._store = MemoryStorage(opaque(SLOT_BYTES), 16, stored_blocks, STORE, facts)
        storages = [] if self._store is None else [FaultyStorage(self._store)]
        self._pools = PoolHarness(
            stored_blocks=stored_blocks, storages=storages, lookup_deadline_s=PATIENCE_S
        )
        self._reads = storages[0] if storages else self._pools.storage
        self._cache = self._pools.pool
        assert self._pools.keep(*(at for at in numbers if place[at] == "M"))
        self._pools.settle()
        if self._store is not None:
            self._hear_of([key for at, key in enumerate(self._keys) if place[at] == "S"])
            self._store.open_finds.clear()
            self._reads.hold("get")
        else:
            (self._reads.fail if case.has_failed else self._reads.hold)("get")
            self._cache.promote([key for at, key in enumerate(self._keys) if place[at] == "A"])
        storage = DISK if self._store is None else STORE
        learn(self._pools.pool.ladder, case, SLOT_BYTES, storage)
        self._promotion = PromptPromotion(
            {KV: self._pools.pool}, BLOCK_TOKENS, SLOT_BYTES, case.always_loads, lambda: self.now_s
        )
        first = case.num_device * BLOCK_TOKENS
        num_tokens = first + len(self._keys) * BLOCK_TOKENS + NUM_TOKENS
        self._prompt = WaitingPrompt(first, num_tokens)
        self._is_new = True

    def _hear_of(self, keys: list[bytes]) -> None:
        _, asked = self._cache.lookup(keys)
        for question in asked:
            question.job.wait(PATIENCE_S)
        self._cache.poll()
        assert all(place is BlockState.STORAGE for place in self._cache.locate_all(keys))

    def ask(self) -> Answer:
        """Decide as ``QueueGate`` and ``KvtierLinker.lookup`` do."""
        if self._is_new:
            with self._promotion.ahead():
                self._look_up()
        self._is_new = False
        if self._promotion.wait("r") is not WaitState.OVER:
            return WAITING
        cuts = self._look_up()
        return Answer(cuts[-1] if cuts else 0)

    def _look_up(self) -> list[int]:
        places, self._pending = self._cache.lookup(self._keys)
        return self._promotion.cuts(
            "r", self._prompt, self._keys, {KV: places}, {KV: 0}, self._pending
        )

    def happen(self, event: str) -> None:
        """See ``WaitCase``."""
        match event:
            case "t":
                self.now_s += LONG_S
            case "a":
                assert self._store is not None
                self._store.open_finds.set()
                for lookup in self._pending:
                    assert lookup.job.wait(PATIENCE_S)
                self._cache.poll()
            case "f":
                self._reads.fail("get")
                self.arrive()
            case "r":
                self.arrive()

    def state(self) -> WaitState:
        return self._promotion.wait("r")

    def arrive(self) -> None:
        self._reads.release()
        self._pools.settle()

    def close(self) -> None:
        self._reads.release()
        if self._store is not None:
            self._store.open_finds.set()
        self._pools.close()


# -- a slab that is called -------------------------------------------------------------------------


class UnderCalls:
    """A look-up in a slab whose callers wait for each call: its blocks are ready where they are."""

    def __init__(self, case: Case) -> None:
        num, first = case.num_found, case.num_device
        self._before = first
        self._caller = Caller(
            memory(64), 64, block_tokens=BLOCK_TOKENS, always_loads=case.always_loads
        )
        self._numbers = range(first, len(case.blocks))
        self._caller.store(*range(first + num))
        costs = self._caller.calls.cache.ladder.costs
        costs.observe_copy((DISK, HOST), BLOCK_BYTES, case.load_s)
        for blocks in (4, 8, 16, 32) if case.computes_s is not None else ():
            costs.observe_prefill(0, blocks * BLOCK_TOKENS, blocks * case.computes_s)

    def ask(self) -> Answer:
        keys = [slab_key_of(number) for number in self._numbers]
        return Answer(self._caller.calls.num_found(keys, self._before))

    def close(self) -> None:
        self._caller.calls.close()


# -- the contract ----------------------------------------------------------------------------------


def check(case: Case, made: UnderVllm | UnderSglang) -> None:
    before = made.ask()
    if before.waits and (case.waited_s or case.has_failed):
        made.now_s += case.waited_s
        if case.has_failed:
            made.arrive()
        before = made.ask()
    assert before == (WAITING if case.waits_for else Answer(case.loads))
    if case.waits_for and "U" not in case.blocks:
        made.arrive()
        assert made.ask() == Answer(case.waits_for)


def check_wait(case: WaitCase, made: UnderVllm | UnderSglang) -> None:
    assert made.ask() == WAITING
    for event in case.happens:
        made.happen(event)
    assert made.state() is case.state


@pytest.mark.parametrize("case", WAITS, ids=str)
def test_vllm_waits(case: WaitCase) -> None:
    made = UnderVllm(case.case)
    check_wait(case, made)
    made.close()


@pytest.mark.parametrize("case", WAITS, ids=str)
def test_sglang_waits(case: WaitCase) -> None:
    made = UnderSglang(case.case)
    try:
        check_wait(case, made)
    finally:
        made.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm(case: Case) -> None:
    made = UnderVllm(case)
    check(case, made)
    made.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sglang(case: Case) -> None:
    made = UnderSglang(case)
    try:
        check(case, made)
    finally:
        made.close()


@pytest.mark.parametrize(
    "case", [case for case in CASES if set(case.blocks) <= set("DM.")], ids=str
)
def test_blocking_calls(case: Case) -> None:
    """Its callers can't wait, and nothing is ever on its way."""
    made = UnderCalls(case)
    assert made.ask() == Answer(case.loads)
    made.close()


def test_connectors_weigh_nothing() -> None:
    """Nor by way of ``kvtier.plan``, which the import contract does not see through."""
    weighing = re.compile(r"\.(load_s|prefill_s|copy_s)\(|\bplan_(load|groups)\b")
    sources = sorted(Path(connectors.__path__[0]).rglob("*.py"))
    assert sources
    assert [source.name for source in sources if weighing.search(source.read_text())] == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if set("MSAU") & set(case.behind)], ids=str
)
def test_log_of_vllm_says_why_blocks_that_were_found_are_computed(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvtier.connectors.vllm.shared.promotion")
    engine = UnderVllm(case)
    answer = engine.ask()
    if case.computes_s is not None and not case.always_loads and answer == Answer():
        assert caplog.records, "nothing is loaded, though there are blocks"
    assert len([record for record in caplog.records if "tokens=" in record.getMessage()]) <= 1
