"""Let SGLang's forward wait for the prefix KV of each layer as it reaches the layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.cache.transfer import CopyJob
from kvtier.core.errors import DeviceError

logger = logging.getLogger(__name__)


class LayerCounter:
    """Replacement of SGLang's ``LayerDoneCounter``. Its methods never raise.

    A failed load is reported when its batch is finished; SGLang then discards the results.
    """

    def __init__(self) -> None:
        self.consumer_index = -1
        """Index of the running batch's load; -1 for a batch that loads nothing."""
        self._loads: dict[int, Sequence[CopyJob]] = {}

    def begin(self, index: int, loads: Sequence[CopyJob]) -> None:
        """Note the loads that a batch's forward waits for."""
        self._loads[index] = loads

    def end(self, index: int) -> None:
        """Note that the batch's forward has ended."""
        self._loads.pop(index, None)

    def set_consumer(self, index: int) -> None:
        """Note the batch of the next forward."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Make compute that is queued from now on wait for the KV of ``layer``."""
        for job in self._loads.get(self.consumer_index, ()):
            try:
                job.hold_compute(layer // job.layers_per_step)
            except DeviceError as error:
                logger.error("kvtier: a layer did not arrive layer=%d error=%s", layer, error)
