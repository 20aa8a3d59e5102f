"""A node's memory in a rank: mapped, registered with the device, and left with the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.guard import SlotGuard
from kvtier.devices.base import Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.host import NodeHost
from tests.kit.nodes import NodeProcess, running
from tests.kit.waiting import wait_until

BLOCK_BYTES = 4096
SEGMENT_BYTES = 4 * BLOCK_BYTES
KEYS = [bytes([number]) * 36 for number in range(6)]


class LockingDevice(CpuDevice):
    """CPU that registers memory, as an accelerator's driver does."""

    name = "locking"

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[Memory] = []
        self.num_locked = 0

    def page_lock(self, memory: Memory) -> bool:
        self.locked.append(memory)
        self.num_locked += 1
        return True

    def unlock(self, memory: Memory) -> None:
        self.locked.remove(memory)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    sizes = (f"--host-capacity={8 * SEGMENT_BYTES}", f"--segment-capacity={SEGMENT_BYTES}")
    with running(tmp_path, *sizes) as made:
        yield made


def _stored(node: NodeProcess) -> tuple[NodeCache, list[int], SlotGuard]:
    """Return an engine's cache that has stored blocks and holds them, their slots and guard."""
    cache = NodeCache(NodeClient(node.socket), lambda: b"s" * 32, BLOCK_BYTES, deadline_s=5.0)
    wait_until(lambda: cache.reserve(KEYS) is not None)
    cache.commit(KEYS, list(range(len(KEYS))))
    held = cache.hold(KEYS)
    assert held.guard is not None
    return cache, [*held.slots], held.guard


def test_segments_are_registered_once_and_those_of_an_earlier_node_released(
    node: NodeProcess,
) -> None:
    device = LockingDevice()
    host = NodeHost(NodeClient(node.socket), device, BLOCK_BYTES, 0, 1)
    cache, slots, guard = _stored(node)
    for _ in range(3):
        memory = host.memory_of(guard)
        assert memory is not None
        host.register(guard, slots)  # type: ignore[arg-type]
    wait_until(lambda: device.num_locked == 2)
    begins = sorted(each.address - memory.memory.address for each in device.locked)
    assert begins == [0, SEGMENT_BYTES], "six blocks lie in two segments"
    old = list(device.locked)
    cache.close()
    node.kill()
    assert host.memory_of(guard) is not None, "what is mapped stays until there is another node"
    node.start()
    cache, slots, guard = _stored(node)
    assert host.memory_of(guard) is not None
    host.register(guard, slots)  # type: ignore[arg-type]
    host.release_old()
    wait_until(
        lambda: device.num_locked == 4 and not set(map(id, old)) & set(map(id, device.locked))
    )
    assert len(device.locked) == 2
    host.close()
    assert not device.locked
    cache.close()


def test_memory_of_a_node_that_is_gone_is_none_and_its_connection_is_not_left(
    node: NodeProcess,
) -> None:
    """A connection that is left behind is a warning of Python's, which is an error here."""
    cache, _, guard = _stored(node)
    cache.close()
    node.kill()
    host = NodeHost(NodeClient(node.socket), CpuDevice(), BLOCK_BYTES, 0, 1)
    assert host.memory_of(guard) is None
    assert host.memory_of(None) is None
    host.close()


def test_a_rank_whose_part_of_a_block_has_another_size_uses_no_memory_of_the_node(
    node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Its part would lie in other blocks."""
    cache, _, guard = _stored(node)
    larger = NodeHost(NodeClient(node.socket), CpuDevice(), BLOCK_BYTES, 1, 2)
    assert larger.memory_of(guard) is None
    assert larger.memory_of(guard) is None
    (told,) = caplog.messages
    assert f"has {BLOCK_BYTES} bytes, and that of the first rank {BLOCK_BYTES // 2}" in told
    equal = NodeHost(NodeClient(node.socket), CpuDevice(), BLOCK_BYTES // 2, 1, 2)
    assert equal.memory_of(guard) is not None
    equal.close()
    larger.close()
    cache.close()
