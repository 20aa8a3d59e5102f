"""Copy to the device in steps, so that compute can start before all of it has arrived."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition

from kvtier.cache.transfer.job import Job
from kvtier.core.errors import CacheError, DeviceError
from kvtier.devices.base import Fence


class CopyJob(Job):
    """A job whose bytes arrive in ``num_steps`` ordered steps, for example one per layer.

    A worker reports the steps it has queued; the engine's thread makes its compute wait for each
    step. Layer l arrives with step ``l // layers_per_step``.
    """

    _changed = Condition()
    """Shared by all jobs: few wait at a time, and creating one per job costs more."""

    def __init__(self, num_bytes: int, num_steps: int, layers_per_step: int = 0) -> None:
        super().__init__(num_bytes)
        self.num_steps = num_steps
        self.layers_per_step = layers_per_step
        self._fences: list[Fence] = []

    def submitted(self, fence: Fence) -> None:
        """Record that the next step's copies are queued; ``fence`` comes after them."""
        with self._changed:
            self._fences.append(fence)
            self._changed.notify_all()

    def finish(self, error: CacheError | None = None, lost: Iterable[int] = ()) -> None:
        super().finish(error, lost)
        with self._changed:
            self._changed.notify_all()

    def hold_compute(self, step: int, timeout_s: float | None = None) -> None:
        """Make compute that the calling thread queues from now on wait for the bytes of ``step``.

        The call blocks until the step's copies are queued, not until they are done. Whether they
        succeeded is known only when the job is done; discard what was computed from them if it
        fails.

        Raises ``DeviceError`` if the job has failed, or if the step was not queued within
        ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._fences) > step or self.done, timeout_s):
                raise DeviceError(f"step {step} of a load was not queued within {timeout_s:.3f} s")
            if self.error is not None or len(self._fences) <= step:
                raise DeviceError(f"step {step} of a load did not arrive: {self.error}")
            fence = self._fences[step]
        fence.hold_compute()
