"""Runs batches on a device: one lane per direction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvtier.devices.base import CopyBatch, Device, Direction, Fence
from kvtier.errors import DeviceError
from kvtier.transfer.batching import split
from kvtier.transfer.job import Job
from kvtier.transfer.lane import Lane


class TransferEngine:
    """Copies in the background, so that the engine can compute meanwhile.

    A batch starts after the compute work that was queued when it was submitted: a store sees the
    finished KV, a load does not overwrite a slot that is still being read.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes = {direction: Lane(direction.value, DeviceError) for direction in Direction}

    def submit(self, batch: CopyBatch, direction: Direction) -> Job:
        """Queue a batch. The memories stay untouched by others until the job is done.

        What goes wrong is reported by the job, never raised.
        """
        lane = self._lanes[direction]
        try:
            fence = self._device.fence()
        except Exception as caught:
            return lane.fail(batch.num_bytes, caught)
        return lane.submit(partial(self._copy, batch, direction, fence), batch.num_bytes)

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes that stand in line or are being copied."""
        return self._lanes[direction].queued_bytes

    def close(self) -> None:
        """Finish what was submitted, then stop the workers."""
        for lane in self._lanes.values():
            lane.close()

    def _copy(
        self, batch: CopyBatch, direction: Direction, fence: Fence, job: Job
    ) -> Iterable[int]:
        fence.wait()
        job.start()
        for piece in split(batch):
            self._device.copy(piece, direction)
        return ()
