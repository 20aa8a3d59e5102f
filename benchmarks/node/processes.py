"""A node in a process of its own, and clients of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from benchmarks.scale.keyed import new_keys
from kvtier.cache.block_cache import BlockCache, BlockState
from kvtier.devices.cpu import CpuDevice
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.host import NodeHost, SlotMemory
from kvtier.node.config import NodeConfig
from tests.kit.nodes import NodeProcess

SPAWN = get_context("spawn")
SCOPE = b"benchmark".ljust(32, b"\0")
PATIENCE_S = 60.0
STORED_AT_ONCE = 5_000

Bytes = npt.NDArray[np.uint8]


class Node(NodeProcess):
    """A node's process.

    Args:
        folder: of its socket.
        host_bytes, segment_bytes: its memory.
    """

    def __init__(self, folder: Path, host_bytes: int, segment_bytes: int) -> None:
        self.config = NodeConfig(
            socket=folder / "node.sock",
            host_capacity=str(host_bytes),
            segment_capacity=str(segment_bytes),
        )
        super().__init__(
            folder,
            f"--host-capacity={host_bytes}",
            f"--segment-capacity={segment_bytes}",
            f"--memory-path={self.config.directory}",
        )

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the thread that serves all engines."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    @property
    def own_bytes(self) -> int:
        """Resident bytes of the process without shared memory: tables and Python objects."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10


@contextmanager
def running_node(host_bytes: int, segment_bytes: int) -> Iterator[Node]:
    with TemporaryDirectory(prefix="kvtier-node-") as folder:
        node = Node(Path(folder), host_bytes, segment_bytes)
        try:
            yield node
        finally:
            node.close()


@contextmanager
def attached(socket: Path, block_bytes: int, engine: str = "") -> Iterator[NodeCache]:
    """Yield a client with its partition opened, and with a deadline that no call misses."""
    cache = NodeCache(NodeClient(socket, engine=engine), lambda: SCOPE, block_bytes, PATIENCE_S)
    try:
        until(lambda: cache.lookup(new_keys(1)) and _instance(cache))
        yield cache
    finally:
        cache.close()


def _instance(cache: NodeCache) -> str:
    """Return the name of the memory whose slots the cache names; "" while it has none."""
    guard = cache.hold([]).guard
    return "" if guard is None else guard.instance


@contextmanager
def mapped(socket: Path, block_bytes: int, engine: str) -> Iterator[NodeHost]:
    """Yield the node's memory, mapped as by a rank of an engine."""
    host = NodeHost(NodeClient(socket, engine=engine), CpuDevice(), block_bytes, 0, 1)
    try:
        yield host
    finally:
        host.close()


def blocks_of(memory: SlotMemory | None, block_bytes: int) -> Bytes:
    """Return mapped memory by slot: uint8 [num_slots, block_bytes]."""
    assert memory is not None, "the node's memory can't be mapped"
    num_bytes = memory.num_slots * block_bytes
    found: Bytes = np.frombuffer(memory.memory.owner, np.uint8)  # type: ignore[call-overload]
    return found[:num_bytes].reshape(memory.num_slots, block_bytes)


def store(cache: BlockCache, keys: Sequence[bytes]) -> None:
    """Store new blocks with arbitrary bytes."""
    for at in range(0, len(keys), STORED_AT_ONCE):
        until(partial(_store, cache, keys[at : at + STORED_AT_ONCE]))


def _store(cache: BlockCache, keys: Sequence[bytes]) -> bool:
    """Reserve and commit blocks; False while the node prepares its memory."""
    reserved = cache.reserve(keys)
    if reserved is not None:
        cache.commit(reserved.keys, range(len(reserved.keys)))
    return reserved is not None


def check_all_there(places: list[BlockState]) -> None:
    """Raise RuntimeError unless every block was found in memory."""
    num = places.count(BlockState.MEMORY)
    if num < len(places):
        raise RuntimeError(f"{len(places) - num} of {len(places)} stored blocks were not found")


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError("the node does not answer")
        time.sleep(0.01)
