"""The seam of I/O engines: batches of reads and writes between one file and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]


class IoEngine(ABC):
    """Reads and writes batches. Returns only when no buffer is in use any more."""

    @abstractmethod
    def read(self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float) -> Int64s:
        """int64 [n]: bytes read, or -errno."""

    @abstractmethod
    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        """int64 [n]: bytes written, or -errno."""

    @abstractmethod
    def sync(self) -> None:
        """Return when what was written is on the medium. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back but the file."""
