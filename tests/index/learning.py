"""A host tier over each index, and the rules of both machines, where a policy learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtier.core.hints import END, OF_POLICIES, BlockHint, HintKind
from kvtier.core.types import DEVICE, HOST, BlockId, Label, Slot
from kvtier.index import State
from kvtier.index.native_index import NativeIndex
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import LRU
from tests.index.policies.live_tier import names
from tests.index.policies.traffic import Keys

NS = b"namespace"


class Host(ABC):
    """A host tier that gets the requested blocks that it admits. The device then evicts them.

    num_left_out: blocks that were not admitted.
    """

    index: Any

    def __init__(self, capacity: int) -> None:
        self.free = [Slot(number) for number in range(capacity)]
        self.num_left_out = 0
        self.index.set_room(HOST, capacity)

    @abstractmethod
    def path(self, prompt: Keys) -> tuple[Any, ...]:
        """Return the arguments by which the index knows a prompt."""

    @abstractmethod
    def insert(self, prompt: Keys, now: float) -> Sequence[BlockId]:
        """Write a prompt's blocks to the device, which has none of them. Return them."""

    @abstractmethod
    def blocks(self, prompt: Keys) -> list[BlockId]:
        """Return the blocks of a prompt that is known."""

    def request(self, prompt: Keys, now: float) -> int:
        """Request a prompt, and store it. Return the number of leading blocks found."""
        index = self.index
        index.on_request(*self.path(prompt), now)
        blocks = list(self.insert(prompt, now))
        states = index.states_of(blocks, HOST)
        found = [*(state is State.READY for state in states), False].index(False)
        held = blocks[:found]
        index.lease(held, HOST)
        new = [block for block, at in zip(blocks, states, strict=True) if at is State.ABSENT]
        admitted = index.admit(new, HOST, len(self.free)) if len(new) > len(self.free) else new
        self.num_left_out += len(new) - len(admitted)
        self.evict(len(admitted) - len(self.free))
        stored = admitted[: len(self.free)]
        index.begin_write(stored, HOST, [self.free.pop() for _ in stored])
        index.commit(stored, HOST, now)
        index.release(held, HOST)
        index.drop(DEVICE, len(blocks))
        return found

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Evict blocks, and return them."""
        chosen = self.index.evict(HOST, max(0, num_blocks))
        self.free += self.index.forget(chosen, HOST)
        return list(chosen)


class TrieHost(Host):
    """A host tier in the index along tokens."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.index = NativeIndex({DEVICE: LRU, HOST: policy})
        super().__init__(capacity)

    def path(self, prompt: Keys) -> tuple[Any, ...]:
        return NS, [Label(int(key).to_bytes(8, "big")) for key in prompt]

    def insert(self, prompt: Keys, now: float) -> Sequence[BlockId]:
        slots = [Slot(number) for number in range(len(prompt))]
        blocks: Sequence[BlockId] = self.index.insert(*self.path(prompt), DEVICE, slots, now).blocks
        return blocks

    def blocks(self, prompt: Keys) -> list[BlockId]:
        return list(self.index.extend(*self.path(prompt)))


class KeyHost(Host):
    """A host tier in the index by keys."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.index = NativeKeyIndex({DEVICE: LRU, HOST: policy}, lambda: NS)
        super().__init__(capacity)

    def path(self, prompt: Keys) -> tuple[Any, ...]:
        return ([int(name).to_bytes(8, "big") for name in names(prompt).tolist()],)

    def insert(self, prompt: Keys, now: float) -> Sequence[BlockId]:
        slots = [Slot(number) for number in range(len(prompt))]
        blocks: Sequence[BlockId]
        blocks, _ = self.index.write_new(*self.path(prompt), DEVICE, slots, now)
        self.index.commit_prompt(blocks, range(len(blocks)), DEVICE, now)
        return blocks

    def blocks(self, prompt: Keys) -> list[BlockId]:
        return list(self.index.find_all(*self.path(prompt)).known)


HOSTS = (TrieHost, KeyHost)

some_prompts = st.runner().flatmap(lambda machine: machine.prompts)
learning_tiers = st.runner().flatmap(lambda machine: st.sampled_from(machine.learning))


class LearningRules(RuleBasedStateMachine):
    """Reports requests and hints to an index.

    prompts: strategy of prompts. learning: tiers where a policy learns. now: time in seconds.
    """

    index: Any
    prompts: st.SearchStrategy[Any]
    learning: Sequence[str]
    now: int

    def named(self, prompt: Any) -> tuple[Any, ...]:
        """Return the arguments by which the index knows a prompt."""
        raise NotImplementedError

    @rule(prompt=some_prompts, passes=st.sampled_from([0, 1, 60]))
    def asked(self, prompt: Any, passes: int) -> None:
        self.now += passes
        self.index.on_request(*self.named(prompt), float(self.now))

    @rule(
        prompt=some_prompts,
        word=st.sampled_from(OF_POLICIES),
        level=st.sampled_from([0, 50, 90]),
        first=st.integers(0, 3),
        length=st.sampled_from([1, 2, END - 3]),
        lasts=st.sampled_from([0, 5, 100]),
    )
    def retain(
        self, prompt: Any, word: HintKind, level: int, first: int, length: int, lasts: int
    ) -> None:
        said = BlockHint(word, level, first, first + length, float(self.now + lasts))
        self.index.retain(*self.named(prompt), said, float(self.now))

    @rule(at_blocks=st.sampled_from([0.0, 2.0, 64.0]))
    def set_recompute_slope(self, at_blocks: float) -> None:
        self.index.set_recompute_slope(at_blocks)

    @rule(prompt=some_prompts, tier=learning_tiers, num_blocks=st.sampled_from([1, 2, 50]))
    def set_room(self, prompt: Any, tier: str, num_blocks: int) -> None:
        self.index.set_room(tier, num_blocks)
        # Blocks beyond the maximum are then forgotten.
        self.index.on_request(*self.named(prompt), float(self.now))
