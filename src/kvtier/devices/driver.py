"""Driver operations that copies need: streams, events, copies, page-locking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies, CopyRows
from kvtier.devices.library import Library


class Driver(ABC):
    """One accelerator, through its vendor's library; each method is one driver call.

    Streams are created by kvtier; the default stream, which would synchronise with all others, is
    never used. Raises ``DriverError``. Thread-safe after ``use``.
    """

    name: str
    """Name of the device in torch: "cuda:0", "npu:1"."""
    library: Library
    FREE_STREAM: str
    SYNCHRONIZE: str
    WAIT: str
    FORGET: str
    FREE: str
    UNLOCK: str
    """Names of the calls whose only argument is a handle or an address."""
    max_copies: int = 4096
    """Maximum number of copies in one batch call."""

    @abstractmethod
    def use(self) -> None:
        """Make the accelerator the calling thread's current one. Cheap if it already is."""

    @abstractmethod
    def describe(self) -> list[Finding]:
        """Return name and version, for ``kvtier doctor``."""

    @property
    def identity(self) -> str:
        """Name of everything that determines copy speed: accelerator and versions."""
        return ", ".join(f"{each.found}, {each.note}" for each in self.describe())

    @cached_property
    def numa_node(self) -> int | None:
        """NUMA node of the host memory nearest to the accelerator; None if unknown."""
        return None

    # -- streams and events -----------------------------------------------------------------------

    @abstractmethod
    def new_stream(self) -> Handle:
        """Create a stream that does not synchronise with other streams."""

    def free_stream(self, stream: Handle) -> None:
        """Destroy a stream whose work is done."""
        self.library.call(self.FREE_STREAM, stream)

    def synchronize(self, stream: Handle) -> None:
        """Wait until the stream's work is done."""
        self.library.call(self.SYNCHRONIZE, stream)

    @abstractmethod
    def hold_stream(self, stream: Handle, event: Handle) -> None:
        """Make work queued on ``stream`` from now on start after ``event``."""

    @abstractmethod
    def record(self, stream: Handle) -> Handle:
        """Create an event after the work that was queued on ``stream`` so far."""

    @abstractmethod
    def has_passed(self, event: Handle) -> bool:
        """Whether the work before the event is done."""

    def wait(self, event: Handle) -> None:
        """Wait until the work before the event is done."""
        self.library.call(self.WAIT, event)

    def forget(self, event: Handle) -> None:
        """Destroy an event."""
        self.library.call(self.FORGET, event)

    # -- copies, all of them asynchronous ---------------------------------------------------------

    @property
    @abstractmethod
    def why_no_batch(self) -> str:
        """Why there is no batch call; "" if there is one."""

    @abstractmethod
    def copy_batch(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        """Queue at most ``max_copies`` copies in one call.

        The arrays must stay alive until the copies are done.
        """

    @abstractmethod
    def copy_each(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        """Queue the copies with one call each."""

    @abstractmethod
    def copy_rows(self, rows: CopyRows, direction: Direction, stream: Handle) -> None:
        """Queue the rectangles with one call each."""

    @abstractmethod
    def is_refusal(self, code: int) -> bool:
        """Whether this error code of a batch call means that the machine does not support it."""

    # -- memory -----------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocate accelerator memory for measurements. Return its address."""

    def free(self, address: int) -> None:
        """Free memory from ``allocate``."""
        self.library.call(self.FREE, address)

    max_lock_bytes: int = 64 << 30
    """Maximum size of one registration: larger ones fail beyond some hundred GiB."""

    @abstractmethod
    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory and map it for the accelerator. Address and size: whole pages."""

    def unlock(self, address: int) -> None:
        """Undo ``lock`` of the memory that begins at ``address``."""
        self.library.call(self.UNLOCK, address)


def pci_numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of the PCI device at ``bus_id`` ("0000:3B:00.0"); None if unknown.

    root: where ``sys`` is mounted.
    """
    try:
        text = (root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
