"""Conformance suite of devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import Thread

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, Device, Direction, Finding, Memory
from kvtier.testing.memory import host_memory, memory_bytes

Bytes = npt.NDArray[np.uint8]
SIZE = 1 << 16


class DeviceSuite(ABC):
    """Conformance suite of devices. Implement ``make_device``.

    For a device with its own memory, also override ``make_memory``, ``fill``, ``content`` and
    ``compute``. Their defaults fit a device that works on host memory.
    """

    @abstractmethod
    def make_device(self) -> Device:
        """Make a device that is ready to copy."""

    def make_memory(self, nbytes: int) -> Memory:
        """Allocate ``nbytes`` of the device's memory."""
        return host_memory(nbytes)

    def fill(self, memory: Memory, data: Bytes) -> None:
        """Write ``data`` to the device's memory, and wait for completion."""
        memory_bytes(memory)[:] = data

    def content(self, memory: Memory) -> Bytes:
        """Return a copy of the content of the device's memory."""
        return memory_bytes(memory).copy()

    def compute(self, memory: Memory, value: int) -> None:
        """Queue compute work that sets every byte of ``memory`` to ``value``; need not wait."""
        memory_bytes(memory)[:] = value

    def make_host_memory(self, device: Device, nbytes: int) -> Memory:
        """Allocate host memory to copy from and to; it may be page-locked."""
        del device
        return host_memory(nbytes)

    # -- copies -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize("num_copies", [1, 2, 7, 300])
    @pytest.mark.parametrize("seed", range(3))
    def test_bytes_arrive_and_the_others_stay(
        self, direction: Direction, num_copies: int, seed: int
    ) -> None:
        rng = np.random.default_rng((seed, num_copies))
        device = self.make_device()
        batch, before, sent = self._batch(device, rng, direction, num_copies)
        device.copy(batch, direction)
        self._check(batch, direction, before, sent)
        np.testing.assert_array_equal(self._src(batch, direction), sent)

    @pytest.mark.parametrize("direction", Direction)
    def test_whole_memory_is_one_copy(self, direction: Direction) -> None:
        rng = np.random.default_rng(0)
        device = self.make_device()
        batch, _, sent = self._batch(device, rng, direction, 1)
        device.copy(_whole(batch.src, batch.dst), direction)
        np.testing.assert_array_equal(self._dst(batch, direction), sent)

    @pytest.mark.parametrize("direction", Direction)
    def test_empty_batch_is_nothing(self, direction: Direction) -> None:
        rng = np.random.default_rng(0)
        device = self.make_device()
        batch, before, _ = self._batch(device, rng, direction, 1)
        nothing = np.zeros(0, np.int64)
        device.copy(CopyBatch(batch.src, batch.dst, nothing, nothing, nothing), direction)
        np.testing.assert_array_equal(self._dst(batch, direction), before)

    def test_load_after_store_gives_the_bytes_back(self) -> None:
        rng = np.random.default_rng(5)
        device = self.make_device()
        there, _, sent = self._batch(device, rng, Direction.STORE, 40)
        # Copy to the same offsets on the other side, where they don't overlap.
        places = there.dst_offset
        store = CopyBatch(there.src, there.dst, places, places, there.size)
        device.copy(store, Direction.STORE)
        back = self.make_memory(SIZE)
        self.fill(back, np.zeros(SIZE, np.uint8))
        load = CopyBatch(there.dst, back, places, places, there.size)
        device.copy(load, Direction.LOAD)
        content = self.content(back)
        for at, size in zip(places.tolist(), there.size.tolist(), strict=True):
            np.testing.assert_array_equal(content[at : at + size], sent[at : at + size])

    def test_directions_may_overlap(self) -> None:
        device = self.make_device()
        made = {
            direction: self._batch(device, np.random.default_rng(index), direction, 200)
            for index, direction in enumerate(Direction)
        }
        threads = [
            Thread(target=device.copy, args=(batch, direction))
            for direction, (batch, _, _) in made.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for direction, (batch, before, sent) in made.items():
            self._check(batch, direction, before, sent)

    # -- order against compute ---------------------------------------------------------------------

    def test_store_after_a_fence_sees_the_work_before_it(self) -> None:
        device = self.make_device()
        pool, host = self.make_memory(SIZE), self.make_host_memory(device, SIZE)
        for value in range(1, 20):
            self.compute(pool, value)
            device.fence().wait()
            device.copy(_whole(pool, host), Direction.STORE)
            assert (memory_bytes(host) == value).all()

    def test_copies_held_for_a_fence_see_the_work_before_it(self) -> None:
        device = self.make_device()
        pool, host = self.make_memory(SIZE), self.make_host_memory(device, SIZE)
        queue = device.queue(Direction.STORE)
        for value in range(1, 20):
            self.compute(pool, value)
            queue.hold_for(device.fence())
            queue.submit(_whole(pool, host))
            done = queue.fence()
            done.wait()
            assert done.passed
            assert (memory_bytes(host) == value).all()

    def test_compute_held_for_a_fence_comes_after_the_copies(self) -> None:
        device = self.make_device()
        pool, host = self.make_memory(SIZE), self.make_host_memory(device, SIZE)
        queue = device.queue(Direction.LOAD)
        for value in range(1, 20):
            queue.hold_for(device.fence())
            queue.submit(_whole(host, pool))
            copied = queue.fence()
            copied.hold_compute()
            self.compute(pool, value)
            copied.wait()
            device.fence().wait()
            assert (self.content(pool) == value).all()

    def test_nothing_is_in_flight_after_a_drain(self) -> None:
        device = self.make_device()
        batch, before, sent = self._batch(device, np.random.default_rng(6), Direction.STORE, 200)
        queue = device.queue(Direction.STORE)
        queue.submit(batch)
        queue.drain()
        self._check(batch, Direction.STORE, before, sent)

    def test_a_further_queue_copies_beside_the_others(self) -> None:
        device = self.make_device()
        try:
            queue = device.make_queue(Direction.LOAD)
        except DeviceError:
            return  # a device needs only one queue per direction
        usual = self._batch(device, np.random.default_rng(8), Direction.LOAD, 100)
        further = self._batch(device, np.random.default_rng(9), Direction.LOAD, 100)
        copier = Thread(target=device.copy, args=(usual[0], Direction.LOAD))
        copier.start()
        queue.hold_for(device.fence())
        queue.submit(further[0])
        queue.fence().wait()
        copier.join()
        queue.close()
        for batch, before, sent in (usual, further):
            self._check(batch, Direction.LOAD, before, sent)

    def test_a_closed_device_gave_everything_back(self) -> None:
        device = self.make_device()
        batch, before, sent = self._batch(device, np.random.default_rng(7), Direction.LOAD, 5)
        device.copy(batch, Direction.LOAD)
        device.close()
        self._check(batch, Direction.LOAD, before, sent)

    def test_fence_may_be_waited_for_twice_and_on_another_thread(self) -> None:
        fence = self.make_device().fence()
        fence.wait()
        waiter = Thread(target=fence.wait)
        waiter.start()
        waiter.join(timeout=60)
        assert not waiter.is_alive()

    # -- other -------------------------------------------------------------------------------------

    def test_locked_memory_can_be_copied_and_unlocked(self) -> None:
        device = self.make_device()
        arena, pool = host_memory(SIZE), self.make_memory(SIZE)
        memory_bytes(arena)[:] = 7
        locked = device.page_lock(arena)
        device.copy(_whole(arena, pool), Direction.LOAD)
        assert (self.content(pool) == 7).all()
        if locked:
            device.unlock(arena)

    def test_device_has_a_name_and_findings(self) -> None:
        device = self.make_device()
        assert device.name
        findings = device.findings()
        assert findings
        assert all(isinstance(line, Finding) for line in findings)

    def _batch(
        self, device: Device, rng: np.random.Generator, direction: Direction, num_copies: int
    ) -> tuple[CopyBatch, Bytes, Bytes]:
        """Return a random batch, and the content of dst and src before the copy."""
        before = rng.integers(0, 256, SIZE, np.uint8)
        sent = rng.integers(0, 256, SIZE, np.uint8)
        pool, host = self.make_memory(SIZE), self.make_host_memory(device, SIZE)
        src, dst = (host, pool) if direction is Direction.LOAD else (pool, host)
        self.fill(pool, before if direction is Direction.LOAD else sent)
        memory_bytes(host)[:] = sent if direction is Direction.LOAD else before
        # Cut the destination into pieces, and use every other one: they never overlap or touch.
        cuts = np.sort(rng.choice(np.arange(1, SIZE), 2 * num_copies, replace=False))
        dst_offset, end = cuts[0::2].astype(np.int64), cuts[1::2]
        size = end - dst_offset
        src_offset = rng.integers(0, SIZE - size + 1).astype(np.int64)
        order = rng.permutation(num_copies)
        return (
            CopyBatch(src, dst, src_offset[order], dst_offset[order], size[order]),
            before,
            sent,
        )

    def _check(self, batch: CopyBatch, direction: Direction, before: Bytes, sent: Bytes) -> None:
        """Compare the destination with plain copies in order."""
        after = before.copy()
        rows = zip(batch.src_offset, batch.dst_offset, batch.size, strict=True)
        for at, to, size in (map(int, row) for row in rows):
            after[to : to + size] = sent[at : at + size]
        np.testing.assert_array_equal(self._dst(batch, direction), after)

    def _dst(self, batch: CopyBatch, direction: Direction) -> Bytes:
        if direction is Direction.LOAD:
            return self.content(batch.dst)
        return memory_bytes(batch.dst).copy()

    def _src(self, batch: CopyBatch, direction: Direction) -> Bytes:
        if direction is Direction.STORE:
            return self.content(batch.src)
        return memory_bytes(batch.src).copy()


def _whole(src: Memory, dst: Memory) -> CopyBatch:
    """Return the copy of one memory to another one."""
    start = np.zeros(1, np.int64)
    return CopyBatch(src, dst, start, start, np.array([SIZE], np.int64))
