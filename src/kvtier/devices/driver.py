"""Driver operations that copying needs: streams, events, copies, page-locking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies


class Driver(ABC):
    """One accelerator, through its vendor's library. Every call is the driver's, at once.

    Streams are the driver's own and never its default one, which would wait for everybody. Raises
    ``DriverError``. Any thread may call, after ``use``.
    """

    name: str
    """As torch names the device: "cuda:0", "npu:1"."""
    max_copies: int = 4096
    """Copies in one batch call."""

    @abstractmethod
    def use(self) -> None:
        """Make the accelerator the calling thread's. Cheap when it is already."""

    @abstractmethod
    def describe(self) -> list[Finding]:
        """Name and version, for ``kvtier doctor``."""

    @property
    def identity(self) -> str:
        """Names what decides how fast copies are: accelerator and versions."""
        return ", ".join(f"{each.found}, {each.note}" for each in self.describe())

    @cached_property
    def numa_node(self) -> int | None:
        """NUMA node of the host memory nearest to the accelerator, where that is known."""
        return None

    # -- streams and events -----------------------------------------------------------------------

    @abstractmethod
    def new_stream(self) -> Handle:
        """A stream that waits for no other by itself."""

    @abstractmethod
    def free_stream(self, stream: Handle) -> None:
        """Give a stream back whose work is done."""

    @abstractmethod
    def synchronize(self, stream: Handle) -> None:
        """Return when the stream's work is done."""

    @abstractmethod
    def hold_stream(self, stream: Handle, event: Handle) -> None:
        """Make everything enqueued on ``stream`` from now on start after ``event``."""

    @abstractmethod
    def record(self, stream: Handle) -> Handle:
        """A new event after the work that ``stream`` has been given so far."""

    @abstractmethod
    def has_passed(self, event: Handle) -> bool:
        """Whether that work is done."""

    @abstractmethod
    def wait(self, event: Handle) -> None:
        """Return when that work is done."""

    @abstractmethod
    def forget(self, event: Handle) -> None:
        """Give an event back that nobody asks about any more."""

    # -- copies, all of them asynchronous ---------------------------------------------------------

    @property
    @abstractmethod
    def why_no_batch(self) -> str:
        """Why there is no batch call; "" where there is one."""

    @abstractmethod
    def copy_batch(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        """At most ``max_copies`` in one call. The arrays stay alive until the copies are done."""

    @abstractmethod
    def copy_each(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        """One call per copy."""

    @abstractmethod
    def copy_rows(self, rows: CopyRows, direction: Direction, stream: Handle) -> None:
        """One call per rectangle."""

    @abstractmethod
    def is_refusal(self, code: int) -> bool:
        """Whether this code of a batch call means that the machine can't do it."""

    # -- memory -----------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Memory of the accelerator, to measure with."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give such memory back."""

    max_lock_bytes: int = 64 << 30
    """Bytes of one registration at most: larger ones fail beyond some hundred GiB."""

    @abstractmethod
    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, and let the accelerator reach it. Both in whole pages."""

    @abstractmethod
    def unlock(self, address: int) -> None:
        """Undo ``lock`` of the memory that begins there."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyRows:
    """Rectangles of a 2-D copy.

    Row r of rectangle i goes from ``src[i] + r * src_pitch[i]`` to ``dst[i] + r * dst_pitch[i]``.
    All int64 [num_rectangles], bytes; height in rows.
    """

    dst: npt.NDArray[np.int64]
    src: npt.NDArray[np.int64]
    dst_pitch: npt.NDArray[np.int64]
    src_pitch: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]
    height: npt.NDArray[np.int64]

    def each(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Rectangle after rectangle: dst, src, dst_pitch, src_pitch, width, height."""
        columns = (self.dst, self.src, self.dst_pitch, self.src_pitch, self.width, self.height)
        return zip(*(column.tolist() for column in columns), strict=True)

    def __len__(self) -> int:
        return len(self.width)
