"""The rules of ``BlockCache`` for a cache in a node, which is a process of its own."""

from __future__ import annotations

from pathlib import Path

from kvtier.testing import BlockCacheHarness, BlockCacheSuite
from kvtier.testing.block_cache_suite import GROUP_BYTES
from tests.kit.nodes import NodeProcess
from tests.kit.waiting import wait_until
from tests.node.harness import node_cache

BLOCK_BYTES = 4096
SEGMENT_BLOCKS = 4
RECORD_BYTES = 64


class NodeHarness(BlockCacheHarness):
    """A node with a slab, and the cache of one engine in it."""

    num_slots = 16

    def __init__(self, folder: Path, group_bytes: int = 0) -> None:
        self._group_bytes = group_bytes
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
        self.cache = node_cache(
            self._node.socket,
            block_bytes=BLOCK_BYTES,
            deadline_s=0.5,
            group_bytes=self._group_bytes,
        )

    def settle(self, num_blocks: int) -> None:
        if not num_blocks:
            return  # nothing was committed that goes there
        num_bytes = RECORD_BYTES * (2 + num_blocks)  # a header, and a record for the namespace
        wait_until(lambda: sum(_sizes(self._disk, "journal")) == num_bytes)

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


class TestNodeCache(BlockCacheSuite):
    def make_harness(self, folder: Path) -> BlockCacheHarness:
        return NodeHarness(folder)


class TestNodeCacheOfTwoGroups(BlockCacheSuite):
    num_groups = 2

    def make_harness(self, folder: Path) -> BlockCacheHarness:
        return NodeHarness(folder, GROUP_BYTES)
