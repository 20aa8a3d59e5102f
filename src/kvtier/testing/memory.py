"""Memory for tests, and distinct bytes for each block, so that a wrong block is detected."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

import numpy as np
import numpy.typing as npt

from kvtier.core.types import Label
from kvtier.devices.base import Memory
from kvtier.layout import KVGroup, Layout, named_layout, repack

Bytes = npt.NDArray[np.uint8]


def host_memory(nbytes: int) -> Memory:
    """Allocate ``nbytes`` zeroed bytes of host memory, owned by a NumPy array."""
    array = np.zeros(nbytes, np.uint8)
    return Memory(array.ctypes.data, nbytes, "host", array)


def memory_bytes(memory: Memory) -> Bytes:
    """Return a view of host memory: uint8 [nbytes]. Its owner must be a buffer (array, mmap)."""
    array = np.frombuffer(memory.owner, np.uint8, memory.nbytes)  # type: ignore[call-overload]
    assert array.ctypes.data == memory.address, "the memory does not begin where its owner does"
    return np.asarray(array)


class BlockBytes:
    """Expected bytes of every block, a pure function of its namespace and whole prefix.

    Two blocks have the same bytes only if they may be shared, so a wrong block is detected.
    """

    def __init__(self, group: KVGroup) -> None:
        self._group = group
        self._layouts: dict[int, Layout] = {}
        self._one = self._block_first(1)
        self._known: dict[tuple[bytes, ...], Bytes] = {}

    def expected(self, namespace: bytes, prefix: Sequence[Label]) -> Bytes:
        """Return the last block of ``prefix``: uint8 [bytes_per_block], ``block_first``."""
        name = (namespace, *prefix)
        if name not in self._known:
            hasher = shake_128()
            for field in name:
                hasher.update(len(field).to_bytes(8, "little") + field)
            self._known[name] = np.frombuffer(hasher.digest(self._one.nbytes), np.uint8)
        return self._known[name]

    def write(self, memory: Memory, layout: Layout, slot: int, block: Bytes) -> None:
        """Write ``block``, in the form of ``expected``, into ``slot``."""
        repack(block, self._one, [0], memory_bytes(memory), layout, [slot])

    def read(self, memory: Memory, layout: Layout, slot: int) -> Bytes:
        """Return the content of ``slot``, in the form of ``expected``."""
        block = np.empty(self._one.nbytes, np.uint8)
        repack(memory_bytes(memory), layout, [slot], block, self._one, [0])
        return block

    def read_all(self, memory: Memory, layout: Layout) -> Bytes:
        """Return the content of every slot: uint8 [num_blocks, bytes_per_block]."""
        blocks = range(layout.num_blocks)
        to = self._block_first(layout.num_blocks)
        content = np.empty(to.nbytes, np.uint8)
        repack(memory_bytes(memory), layout, blocks, content, to, blocks)
        return content.reshape(layout.num_blocks, -1)

    def _block_first(self, num_blocks: int) -> Layout:
        if num_blocks not in self._layouts:
            self._layouts[num_blocks] = named_layout("block_first", self._group, num_blocks)
        return self._layouts[num_blocks]
