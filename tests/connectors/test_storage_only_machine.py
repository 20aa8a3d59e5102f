"""A slab as a cache: stores, loads, damage and restarts in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.common.names import block_key
from kvtier.testing.storage import StoredBlocks
from tests.connectors.storage_harness import DIGEST, Harness, key_of, memory


class Model(RuleBasedStateMachine):
    """Loads are right or misses; capacity is a bound; blocks are lost only by eviction."""

    @initialize()
    def begin(self) -> None:
        self.stored_blocks = StoredBlocks()
        self.tier = memory(5, self.stored_blocks)
        self.harness = Harness(self.tier, most_queued=4)

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=5)

    @rule(numbers=numbers)
    def store(self, numbers: list[int]) -> None:
        self.harness.submit(False, numbers)

    @rule(numbers=numbers)
    def load(self, numbers: list[int]) -> None:
        self.harness.settle()
        ready = {n for n in numbers if self.harness.find(n) is BlockState.STORAGE}
        good = {n for n in ready if block_key(DIGEST, key_of(n)) not in self.tier.spoiled}
        assert set(self.harness.load(*numbers)) == good

    @rule(numbers=numbers)
    def load_and_go_on(self, numbers: list[int]) -> None:
        self.harness.submit(True, numbers)

    @rule(numbers=numbers)
    def touch(self, numbers: list[int]) -> None:
        self.harness.slab.touch([key_of(number) for number in numbers])

    @rule(number=st.integers(0, 11))
    def spoil(self, number: int) -> None:
        self.tier.spoiled ^= {block_key(DIGEST, key_of(number))}

    @rule()
    def collect(self) -> None:
        self.harness.settle()

    @rule()
    def restart(self) -> None:
        self.harness.slab.close()
        spoiled = self.tier.spoiled
        self.tier = memory(5, self.stored_blocks)
        self.tier.spoiled = spoiled
        self.harness = Harness(self.tier, most_queued=4)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "harness"):
            assert self.harness.slab.num_blocks <= 5

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.settle()
            # Blocks that a scrub found damaged are gone; the next look-up reports them as absent.
            assert self.tier.num_used <= self.harness.slab.num_blocks, "a slot is lost"
            self.harness.slab.close()


TestAnyOrder = Model.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
