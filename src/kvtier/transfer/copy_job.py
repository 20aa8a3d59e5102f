"""A copy on its way to the device in steps, so that compute can follow close behind."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition

from kvtier.devices.base import Fence
from kvtier.errors import CacheError, DeviceError
from kvtier.transfer.job import Job


class CopyJob(Job):
    """A job whose bytes arrive in ``num_steps`` steps, in order: a layer each, for instance.

    A worker says how far it has come; the engine's thread has its compute wait, step by step.
    Layer l arrives with step ``l // layers_per_step``.
    """

    _changed = Condition()
    """One for all jobs: few wait at a time, and to make one for each costs more."""

    def __init__(self, num_bytes: int, num_steps: int, layers_per_step: int = 0) -> None:
        super().__init__(num_bytes)
        self.num_steps = num_steps
        self.layers_per_step = layers_per_step
        self._fences: list[Fence] = []

    def submitted(self, fence: Fence) -> None:
        """The next step's copies are queued; ``fence`` comes after them."""
        with self._changed:
            self._fences.append(fence)
            self._changed.notify_all()

    def finish(self, error: CacheError | None = None, lost: Iterable[int] = ()) -> None:
        super().finish(error, lost)
        with self._changed:
            self._changed.notify_all()

    def hold_compute(self, step: int, timeout_s: float | None = None) -> None:
        """Compute that the calling thread queues from now on finds the bytes of ``step``.

        Waits until the step's copies are queued, not until they are done. Whether they succeeded is
        known when the job is done; before, nothing that was computed from them counts.
        Raises ``DeviceError`` where the job failed already, or the step was not queued within
        ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._fences) > step or self.done, timeout_s):
                raise DeviceError(f"step {step} of a load was not queued within {timeout_s:.3f} s")
            if self.error is not None or len(self._fences) <= step:
                raise DeviceError(f"step {step} of a load did not arrive: {self.error}")
            fence = self._fences[step]
        fence.hold_compute()
