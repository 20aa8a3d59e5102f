"""A device that records page-locking, and blocks in it where a test needs that."""

from __future__ import annotations

from collections.abc import Container
from threading import Condition

from kvtier.core.errors import DeviceError
from kvtier.devices import Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.tiers.memory.arena import Arena

PATIENCE_S = 60.0


class LockingDevice(CpuDevice):
    """A CPU device that grants page-locking.

    num_granted: calls of ``page_lock`` that return at once. Others block until ``grant_next`` or
        ``grant_all``. None for all.
    refused, broken: indices of the calls that return False or raise.
    node: its NUMA node.
    """

    def __init__(
        self,
        num_granted: int | None = None,
        refused: Container[int] = (),
        broken: Container[int] = (),
        node: int | None = None,
    ) -> None:
        super().__init__(threads=1)
        self.asked: list[Memory] = []
        self.locked: list[Memory] = []
        self.unlocked: list[Memory] = []
        self._num_granted = float("inf") if num_granted is None else num_granted
        self._refused = refused
        self._broken = broken
        self._node = node
        self._changed = Condition()

    @property
    def numa_node(self) -> int | None:
        return self._node

    def page_lock(self, memory: Memory) -> bool:
        with self._changed:
            number = len(self.asked)
            self.asked.append(memory)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number < self._num_granted, PATIENCE_S)
            if number in self._broken:
                raise DeviceError("the test wants this lock to fail")
            if number in self._refused:
                return False
            self.locked.append(memory)
            return True

    def unlock(self, memory: Memory) -> None:
        with self._changed:
            self.unlocked.append(memory)

    def grant_next(self, arena: Arena) -> None:
        """Let one more call return, and wait until its segment is open."""
        with self._changed:
            self._num_granted += 1
            self._changed.notify_all()
            is_last = self._num_granted >= len(arena.segments)
            # The arena requests a segment only after the one before is open.
            assert is_last or self._changed.wait_for(
                lambda: len(self.asked) > self._num_granted, PATIENCE_S
            )
        assert not is_last or arena.wait(PATIENCE_S)

    def grant_all(self) -> None:
        with self._changed:
            self._num_granted = float("inf")
            self._changed.notify_all()
