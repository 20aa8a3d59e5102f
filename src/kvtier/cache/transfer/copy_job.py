"""Copy to the device in steps: each layer's compute waits only for its own KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Condition
from time import perf_counter

from kvtier.cache.transfer.job import Job
from kvtier.core.errors import CacheError, DeviceError
from kvtier.devices.base import Fence

PATIENCE_S = 1.0
"""Longest total time that a forward waits for the loads that it follows."""


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


class LayerGate:
    """Gate that a forward passes at each layer while its prefix is being loaded.

    The results count only once the lease is ready and not broken.

    loads: the jobs to follow, each in steps.
    patience_s: total time that this gate's methods may block. After that they raise
    ``DeviceError``; the loads continue.
    """

    def __init__(self, loads: Sequence[CopyJob], patience_s: float | None = None) -> None:
        self._loads = loads
        self._left_s = PATIENCE_S if patience_s is None else min(PATIENCE_S, patience_s)

    def hold_compute(self, layer: int) -> None:
        """Make compute that the calling thread queues from now on wait for the KV of ``layer``.

        Blocks at most until the layer's copies are queued. Raises ``DeviceError`` if they fail or
        take too long.
        """
        for job in self._loads:
            began = perf_counter()
            job.hold_compute(layer // job.layers_per_step, max(0.0, self._left_s))
            self._left_s -= perf_counter() - began

    def wait(self) -> None:
        """Wait until the loads have ended, successfully or not.

        Raises ``DeviceError`` if that takes too long.
        """
        for job in self._loads:
            began = perf_counter()
            if not job.wait(max(0.0, self._left_s)):
                raise DeviceError("a load took longer than a forward may wait for it")
            self._left_s -= perf_counter() - began
