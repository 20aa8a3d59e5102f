"""A node and a model with two KV groups, whose blocks for the same tokens leave together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.core.errors import ConfigError
from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.node.client.cache import NodeCache
from kvtier.node.server.partition_key import PartitionKey
from kvtier.testing.block_cache_suite import GROUP_BYTES
from tests.kit.nodes import NodeProcess, running
from tests.kit.waiting import wait_until
from tests.node.harness import SCOPE, node_cache

BLOCK_BYTES = 4096
NUM_SLOTS = 16
NUM_PLACES = 3
MEMORY = BlockState.MEMORY


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    sizes = (f"--host-capacity={NUM_SLOTS * BLOCK_BYTES}", f"--segment-capacity={4 * BLOCK_BYTES}")
    with running(tmp_path, *sizes) as made:
        yield made


def _open(node: NodeProcess) -> NodeCache:
    return node_cache(node.socket, block_bytes=BLOCK_BYTES, group_bytes=GROUP_BYTES)


def _prompt(number: int, num_groups: int = 2) -> list[bytes]:
    return [
        (b"prompt %d place %d" % (number, place)).ljust(32) + group.to_bytes(GROUP_BYTES, "big")
        for place in range(NUM_PLACES)
        for group in range(num_groups)
    ]


def _store(cache: NodeCache, keys: list[bytes]) -> int:
    """Store the blocks of a prompt that are admitted. Return how many."""
    cache.on_request(keys)
    reserved = cache.reserve(keys)
    if reserved is None:
        return 0
    cache.commit(reserved.keys, range(len(reserved.keys)))
    return len(reserved.keys)


def _states(cache: NodeCache, keys: list[bytes]) -> list[BlockState]:
    cache.poll()
    wait_until(lambda: BlockState.UNKNOWN not in cache.lookup(keys).states)
    states = cache.lookup(keys).states
    cache.poll()
    return states


@pytest.mark.skipif(not NATIVE, reason=f"no native core: {NATIVE_REASON}")
def test_blocks_for_the_same_tokens_are_evicted_together(node: NodeProcess) -> None:
    """Two prompts of both groups leave room for four blocks, and prompts of one group follow."""
    cache = _open(node)
    prompts = [_prompt(0), _prompt(1)]
    for keys in prompts:
        assert _store(cache, keys) == len(keys)
    num_left = []
    for number in range(2, 6):
        for _ in range(2):  # what comes again is admitted
            _store(cache, _prompt(number, num_groups=1))
        states = [_states(cache, keys) for keys in prompts]
        assert all(of_prompt[::2] == of_prompt[1::2] for of_prompt in states)
        num_left.append(sum(of_prompt.count(MEMORY) for of_prompt in states))
    assert num_left[-1] < 2 * len(prompts[0]), "something has left"
    cache.close()


def test_rooms_of_one_group_and_of_several_are_others() -> None:
    """A folder's name says which it is: a node that starts again knows no engine yet."""
    one, several = (PartitionKey("a-ab", SCOPE, BLOCK_BYTES, 36, num) for num in (0, GROUP_BYTES))
    assert [PartitionKey.of_folder(key.folder) for key in (one, several)] == [one, several]
    assert one.folder == f"a-ab-{SCOPE.hex()}-{BLOCK_BYTES}-36", "as it was stored before"
    assert one.name != several.name
    assert one.namespace == several.namespace
    with pytest.raises(ConfigError, match="keys of 4 bytes can't name their KV group in 4"):
        PartitionKey("a", SCOPE, BLOCK_BYTES, 4, 4).check()
