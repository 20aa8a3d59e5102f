"""Computing while a load is in progress: each layer waits only for its own KV."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from kvtier.cache.transfer.copy_job import CopyJob
from kvtier.core.errors import DeviceError

PATIENCE_S = 1.0
"""Longest total time that a forward waits for the loads that it follows."""


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
