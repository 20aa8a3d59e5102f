"""The rules of ``BlockCache`` for a cache in a node, which is a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.testing import BlockCacheHarness, BlockCacheSuite
from tests.kit.nodes import NodeProcess

BLOCK_BYTES = 4096
SEGMENT_BLOCKS = 4
RECORD_BYTES = 64


class NodeHarness(BlockCacheHarness):
    """A node with a slab, and the cache of one engine in it."""

    num_slots = 16

    def __init__(self, folder: Path) -> None:
        self._disk = folder / "disk"
        self._node = NodeProcess(
            folder,
            f"--host-capacity={self.num_slots * BLOCK_BYTES}",
            f"--segment-capacity={SEGMENT_BLOCKS * BLOCK_BYTES}",
            f"--disk-path={self._disk}",
            "--disk-capacity=1MiB",
        )
        self._open()

    def _open(self) -> None:
        client = NodeClient(self._node.socket)
        self.cache = NodeCache(client, lambda: b"s" * 32, BLOCK_BYTES, deadline_s=0.5)
        probe = [b"p" * 36]
        _until(lambda: self.cache.reserve(probe) is not None)
        self.cache.abort(probe)

    def settle(self, num_blocks: int) -> None:
        if not num_blocks:
            return  # nothing was committed that goes there
        num_bytes = RECORD_BYTES * (2 + num_blocks)  # a header, and a record for the namespace
        _until(lambda: sum(_sizes(self._disk, "journal")) == num_bytes)

    def fail_reads(self) -> None:
        for data in self._disk.rglob("data.slab"):
            with data.open("r+b") as file:
                file.write(b"\xff" * data.stat().st_size)

    def stop(self) -> None:
        self._node.pause()

    def resume(self) -> None:
        self._node.resume()

    def restart(self) -> None:
        self.cache.close()
        self._node.lose()
        self._node.start()
        self._open()

    def close(self) -> None:
        self.resume()
        self.cache.close()
        self._node.close()


def _sizes(folder: Path, name: str) -> list[int]:
    return [each.stat().st_size for each in folder.rglob(name)]


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class TestNodeCache(BlockCacheSuite):
    def make_harness(self, folder: Path) -> BlockCacheHarness:
        return NodeHarness(folder)
