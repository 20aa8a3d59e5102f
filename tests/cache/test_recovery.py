"""A tier that was slow for a moment is used again; one that stays slow is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, cycle

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer.ranks import Done, RankOrder, Report, Verb
from kvtier.core.types import DEVICE, DISK, HOST, Direct
from kvtier.plan.decide import Compute, FoundBlocks, Waited, decide

from .keyed_harness import BLOCK_BYTES, Engine

BLOCK_TOKENS = 16
NUM_BLOCKS = 6
"""Blocks of a prompt."""
COPY_S, PREFILL_S = 1e-4, 1e-3
"""Seconds per block. A load takes at most a fifth of the time of a prefill."""
SLOWNESS = 200
PROMPT_S = 0.1
"""Time between prompts."""
STORE = "store"
KINDS = [DISK, STORE, HOST, "direct"]


class Served:
    """Prompts over one tier, some of whose copies are slow.

    now_s: current time.
    slow_copies: how many of the next copies along the tier's route are slow.
    num_read: blocks read from storage, probes included.
    """

    def __init__(self, kind: str) -> None:
        self.now_s = 0.0
        self.slow_copies = 0
        self.num_read = 0
        self.engine = Engine(
            num_host=NUM_BLOCKS if kind != HOST else 100,
            num_disk=100 if kind != STORE else 0,
            stores=(STORE,) if kind == STORE else (),
            direct=Direct.ON if kind == "direct" else Direct.OFF,
            clock=lambda: self.now_s,
        )
        self.slow_route = {HOST: (HOST, DEVICE), "direct": (DISK, DEVICE)}.get(kind, (kind, HOST))
        numbers = count(1)
        self._prompts = [
            [next(numbers).to_bytes(3, "big") for _ in range(NUM_BLOCKS)] for _ in range(5)
        ]
        for prompt in self._prompts:
            self.engine.store(prompt)
            self._carry_out()
        self._next = cycle(self._prompts)

    def serve(self, num_prompts: int) -> list[int]:
        """Serve prompts. Return how many blocks were loaded for each."""
        return [self._serve(next(self._next)) for _ in range(num_prompts)]

    def serve_while_slow(self, num_copies: int) -> None:
        """Serve prompts until ``num_copies`` copies were slow."""
        self.slow_copies = num_copies
        for _ in range(1000):
            if not self.slow_copies:
                return
            self.serve(1)
        raise AssertionError("the tier is not used any more")

    def _serve(self, keys: Sequence[bytes]) -> int:
        self.now_s += PROMPT_S
        cache = self.engine.cache
        places = cache.locate_all(keys)
        ends = [(at + 1) * BLOCK_TOKENS for at in range(len(keys))]
        found = FoundBlocks(
            0,
            ends[-1] + 1,
            ready=[],
            reachable=ends,
            sources=lambda end: cache.sources(keys[: end // BLOCK_TOKENS]),
            block_size=BLOCK_TOKENS,
            bytes_per_block=BLOCK_BYTES,
        )
        decision = decide(found, Waited(), self.engine.ladder.cost_snapshot, self.now_s)
        num = 0 if isinstance(decision, Compute) else decision.end // BLOCK_TOKENS
        stored = [key for key, at in zip(keys, places, strict=True) if at is BlockState.STORAGE]
        self._load(keys[:num], [key for key in stored if key in keys[:num]])
        cache.probe([key for key in stored if key not in keys[:num]])
        self._carry_out()
        num_tokens = (len(keys) - num) * BLOCK_TOKENS + 1
        seconds = num_tokens / BLOCK_TOKENS * PREFILL_S
        self.engine.ladder.costs.observe_prefill(num * BLOCK_TOKENS, num_tokens, seconds)
        return num

    def _load(self, keys: Sequence[bytes], stored: Sequence[bytes]) -> None:
        cache = self.engine.cache
        if stored and cache.direct_reads.is_for_all:
            cache.direct_reads.read(stored, range(len(stored)))
            for order in self.engine.mover.take_reads():
                self._end(order, (DISK, DEVICE))
        elif stored:
            assert cache.promote(stored) == len(stored)
            self._carry_out()
        in_memory = [key for key in keys if cache.locate(key) is BlockState.MEMORY]
        if in_memory:
            num_bytes = len(in_memory) * BLOCK_BYTES
            seconds = self._seconds((HOST, DEVICE), len(in_memory))
            self.engine.ladder.costs.observe_copy((HOST, DEVICE), num_bytes, seconds)

    def _carry_out(self) -> None:
        while orders := self.engine.mover.take_orders():
            for order in orders:
                route = (order.tier, HOST) if order.verb is Verb.READ else (HOST, order.tier)
                self._end(order, route)

    def _end(self, order: RankOrder, route: tuple[str, str]) -> None:
        num = len(order.names)
        if order.verb is Verb.READ:
            self.num_read += num
        seconds = self._seconds(route, num)
        done = Done(frozenset(), frozenset(), 0, 1, num * BLOCK_BYTES, seconds)
        self.engine.hear(Report(done={order.order_id: done}))

    def _seconds(self, route: tuple[str, str], num_blocks: int) -> float:
        seconds = num_blocks * COPY_S
        is_storage = route[0] != HOST and route[0] == self.slow_route[0]
        if self.slow_copies and (route == self.slow_route or is_storage):
            self.slow_copies -= 1
            return SLOWNESS * seconds
        return seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slow", [1, 3, 10, 30])
def test_after_slow_copies_a_tier_is_used_again_within_twenty_prompts(
    kind: str, num_slow: int
) -> None:
    served = Served(kind)
    assert served.serve(20)[1:] == [NUM_BLOCKS] * 19
    served.serve_while_slow(num_slow)
    served.serve(20)
    assert served.serve(20) == [NUM_BLOCKS] * 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_whose_first_copies_were_slow_is_used(kind: str) -> None:
    """The engine starts on a busy machine."""
    served = Served(kind)
    served.serve_while_slow(5)
    served.serve(20)
    assert served.serve(20) == [NUM_BLOCKS] * 20


@pytest.mark.parametrize("kind", KINDS)
def test_one_slow_copy_changes_no_decision(kind: str) -> None:
    served = Served(kind)
    served.serve(20)
    served.slow_copies = 1
    assert served.serve(5) == [NUM_BLOCKS] * 5
    assert not served.slow_copies


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_stays_slow_is_left_alone(kind: str) -> None:
    """Only probes read it, for which no request waits. A trial from memory loads a single block."""
    served = Served(kind)
    served.serve(20)
    served.slow_copies = 10**6
    served.serve(20)
    loaded = served.serve(200)
    if kind == HOST:
        assert max(loaded) == 1
        assert sum(loaded) <= 200 * PROMPT_S / 0.5
    else:
        assert sum(loaded) == 0


def test_probes_read_little_of_a_tier_that_stays_slow() -> None:
    served = Served(DISK)
    served.serve(20)
    served.slow_copies = 10**6
    served.serve(20)
    before = served.num_read
    served.serve(200)
    assert 0 < served.num_read - before <= NUM_BLOCKS * 200 * PROMPT_S / 0.25
