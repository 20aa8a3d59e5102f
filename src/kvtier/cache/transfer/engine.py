"""Runs copy batches on a device, with one lane per direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvtier.cache.transfer.copy_job import CopyJob
from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.lane import Lane
from kvtier.cache.transfer.staging import Steps, split
from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, Device, Direction, Fence


class TransferEngine:
    """Copies in the background while the engine computes.

    A copy starts after the compute work that was queued before it was submitted. So a store reads
    finished KV, and a load does not overwrite a slot that is still being read.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes = {direction: Lane(direction.value, DeviceError) for direction in Direction}

    def start(self) -> None:
        """Start the workers now: they inherit the cores of the calling thread."""
        for lane in self._lanes.values():
            lane.start()

    def submit(self, steps: Steps | Sequence[CopyBatch], direction: Direction) -> CopyJob:
        """Queue batches in this order; compute may follow them step by step.

        Nothing else may access the memories until the job is done. Errors are reported by the job,
        never raised.
        """
        lane = self._lanes[direction]
        if isinstance(steps, Steps):  # the worker computes the batches
            job = CopyJob(steps.num_bytes, len(steps), steps.layers_per_step)
        else:
            job = CopyJob(sum(step.num_bytes for step in steps), len(steps))
        try:
            after = self._device.fence()
        except Exception as caught:
            lane.fail(job, caught)
            return job
        lane.submit(partial(self._copy, job, steps, direction, after), job.num_bytes, job=job)
        return job

    def queued_bytes(self, direction: Direction) -> int:
        """Return the bytes that are queued or being copied."""
        return self._lanes[direction].queued_bytes

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was submitted, then stop the workers. Return False on timeout."""
        ended = [lane.close(timeout_s) for lane in self._lanes.values()]
        return all(ended)

    def _copy(
        self,
        job: CopyJob,
        steps: Iterable[CopyBatch],
        direction: Direction,
        after: Fence,
        _: Job,
    ) -> Iterable[int]:
        """Queue all copies behind ``after``, then wait for them. Runs on the lane's thread."""
        queue = self._device.queue(direction)
        try:
            queue.hold_for(after)
            turn = _Turn(job, queue.fence())
            for step in steps:
                for piece in split(step):
                    turn.look()
                    queue.submit(piece)
                job.submitted(queue.fence())
            done = queue.fence()
            turn.wait()
            done.wait()
        except BaseException:
            queue.drain()  # the memories must not be used while a copy is in flight
            raise
        return ()


class _Turn:
    """Starts a job's time when its copies begin, not while they are queued behind other work.

    If in doubt, the time starts too early: overestimating a copy's duration does no harm.
    """

    def __init__(self, job: Job, begin: Fence) -> None:
        self._job = job
        self._begin = begin
        self._has_begun = begin.passed
        job.start()

    def look(self) -> None:
        if not self._has_begun:
            self._job.start()
            self._has_begun = self._begin.passed

    def wait(self) -> None:
        self.look()
        if not self._has_begun:
            self._begin.wait()
            self._job.start()
