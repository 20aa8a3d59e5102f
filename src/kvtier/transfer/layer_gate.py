"""Computing close behind a load: each layer waits for its own KV, not for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from kvtier.errors import DeviceError
from kvtier.transfer.copy_job import CopyJob

PATIENCE_S = 1.0
"""Longest total wait of a forward for the loads that it follows."""


class LayerGate:
    """Gate that a forward passes at each layer while its prefix is being loaded.

    What was computed behind it counts only once its lease is ready, and not broken. loads: each
    in steps. patience_s: how long its methods may block, all
    calls together; after that they raise ``DeviceError``, and the loads go on.
    """

    def __init__(self, loads: Sequence[CopyJob], patience_s: float | None = None) -> None:
        self._loads = loads
        self._left_s = PATIENCE_S if patience_s is None else min(PATIENCE_S, patience_s)

    def hold_compute(self, layer: int) -> None:
        """Compute that the calling thread queues from now on finds the KV of ``layer``.

        Waits until the layer's copies are queued at most. ``DeviceError`` where they won't come.
        """
        for job in self._loads:
            began = perf_counter()
            job.hold_compute(layer // job.layers_per_step, max(0.0, self._left_s))
            self._left_s -= perf_counter() - began

    def wait(self) -> None:
        """Return when the loads have ended, well or not.

        ``DeviceError`` where that takes too long.
        """
        for job in self._loads:
            began = perf_counter()
            if not job.wait(max(0.0, self._left_s)):
                raise DeviceError("a load took longer than a forward may wait for it")
            self._left_s -= perf_counter() - began
