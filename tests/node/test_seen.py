"""Blocks that an engine has seen in a node's memory: look-ups without a message."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.seen import SeenBlocks
from tests.node.harness import LocalNode, node_cache

KEYS = [bytes([number]) * 36 for number in range(6)]
NOWHERE, MEMORY = BlockState.NOWHERE, BlockState.MEMORY


@pytest.fixture
def cache(node: LocalNode) -> Iterator[NodeCache]:
    """A client that has stored four blocks."""
    cache = node_cache(node.config.socket)
    assert cache.reserve(KEYS[:4]) is not None
    cache.commit(KEYS[:4], range(4))
    yield cache
    cache.close()


def generations_of(node: LocalNode) -> npt.NDArray[np.int64]:
    [partition] = node.node.partitions
    return partition.tier.generations


def evict(node: LocalNode) -> None:
    """Evict all blocks that no engine uses."""
    [partition] = node.node.partitions
    node.do(lambda: list(partition.evict_all()))


def test_node_that_does_not_answer_is_not_needed_for_blocks_that_were_seen(
    node: LocalNode, cache: NodeCache
) -> None:
    with node.held_up():
        assert cache.lookup(KEYS[:4]).states == [MEMORY] * 4
        cache.poll()
    assert cache.lookup(KEYS).states == [MEMORY] * 4 + [NOWHERE] * 2


def test_blocks_of_another_engine_are_seen_once_they_were_looked_up_twice(
    node: LocalNode, cache: NodeCache
) -> None:
    cache.lookup(KEYS[4:])  # an answer: the blocks are committed
    other = node_cache(node.config.socket)
    for num_seen in (0, 4):
        assert other.lookup(KEYS).states == [MEMORY] * 4 + [NOWHERE] * 2
        other.poll()
        assert other._partition.seen.num_there(KEYS, generations_of(node)) == num_seen
    with node.held_up():
        assert other.lookup(KEYS[:4]).states == [MEMORY] * 4
    other.close()


def test_seen_block_that_was_evicted_is_not_found(node: LocalNode, cache: NodeCache) -> None:
    assert cache.lookup(KEYS[4:]).states == [NOWHERE] * 2
    evict(node)
    assert cache.lookup(KEYS[:4]).states == [NOWHERE] * 4


def test_block_that_is_evicted_between_look_up_and_hold_fails_the_check_of_its_copy(
    node: LocalNode, cache: NodeCache
) -> None:
    assert cache.lookup(KEYS).states == [MEMORY] * 4 + [NOWHERE] * 2
    held = cache.hold(KEYS[:1])  # from now on it can't leave
    evict(node)
    failed = cache.hold(KEYS[:2])
    assert held.guard is not None
    assert failed.guard is not None
    assert failed.guard.generations == [*held.guard.generations, -1]
    cache.release(KEYS[:2])
    cache.release(KEYS[:1])
    cache.poll()
    node.until(
        lambda: all(engine.num_slots == 0 for engine in node.server.registry.engines.values())
    )


def test_node_is_asked_again_about_a_block_that_it_did_not_have(
    node: LocalNode, cache: NodeCache
) -> None:
    """So a slot that is free, and has the generation that it had, misleads one load at most."""
    [partition] = node.node.partitions
    cache.lookup(KEYS[4:])  # an answer: the blocks are committed
    before = partition.tier.generations.copy()
    evict(node)
    partition.tier.generations[:] = before
    assert cache.lookup(KEYS[:1]).states == [MEMORY]
    assert cache.hold(KEYS[:1]).guard.generations == [-1]
    cache.poll()
    assert cache.lookup(KEYS[:1]).states == [NOWHERE]


@pytest.mark.parametrize("num_new", [1, 3, 9])
def test_of_more_blocks_than_it_may_note_all_are_forgotten(num_new: int) -> None:
    seen, generations = SeenBlocks(most=8), np.full(16, 3)
    keys = [bytes([number]) for number in range(6 + num_new)]
    seen.note(keys[:6], np.arange(6), generations[:6])
    assert seen.num_there(keys[:6], generations) == 6
    seen.note(keys[6:], np.arange(6, 6 + num_new), generations[6 : 6 + num_new])
    assert seen.num_there(keys[:6], generations) == (6 if num_new == 1 else 0)
    assert seen.num_there(keys[6:], generations) == (0 if num_new == 9 else num_new)


def test_blocks_up_to_the_first_one_in_another_generation_are_there() -> None:
    seen, generations = SeenBlocks(), np.full(4, 3)
    seen.note(KEYS[:4], np.arange(4), generations)
    assert seen.num_there(KEYS, generations) == 4
    assert seen.num_there(KEYS[4:], generations) == 0
    generations[2] = 5
    assert seen.num_there(KEYS[:4], generations) == 2
    seen.note(KEYS[2:3], np.array([2]), np.array([5]))
    assert seen.num_there(KEYS[:4], generations) == 4


def test_node_was_asked_about_few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.node.client.seen.MAX_ASKED", 2)
    seen = SeenBlocks()
    asked = [seen.is_asked_again(KEYS[number]) for number in (0, 1, 0, 2, 0, 1)]
    assert asked == [False, False, True, False, True, False]
