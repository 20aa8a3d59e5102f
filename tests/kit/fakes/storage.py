"""Fake file libraries of accelerators: cuFile, hipFile and NDS, over fake drivers."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint
from enum import IntEnum

from tests.kit.effort import EFFORT
from tests.kit.fakes.fake import Fake, link

STORAGE = {
    "cufile113": ("cuda130", ("cuda", 13000), ("file_api", 11130)),
    "cufile115": ("cuda130", ("cuda", 13000), ("file_api", 11150)),
    "cufile120": ("cuda130", ("cuda", 13000), ("file_api", 11200)),
    "hipfile03": ("hip713", ("hip", 71300000), ("file_api", 20030)),
    "nds": ("cann91", ("ascend", 901), ("file_api", 30000)),
}
"""Per variant the driver's, and the parts that it is built from, in the library with the driver."""
LIBRARIES = list(STORAGE) if EFFORT == 1 else list(STORAGE)[::2]
"""Variants of the long tests."""

ARGUMENTS = {
    "fake_storage_reset": (c_uint, c_int, c_int, c_int),
    "fake_storage_hold": (c_int,),
    "fake_storage_fail": (c_int, c_int, c_int),
    "fake_storage_cancels": (c_int,),
    "fake_storage_fail_submit": (c_int,),
    "fake_storage_limit_pinned": (c_size_t,),
    "fake_storage_num_moving": (),
    "fake_storage_num_transfers": (),
    "fake_storage_leaks": (ctypes.c_char_p, c_size_t),
}


class Fault(IntEnum):
    """Fault of a transfer."""

    ERROR = 1
    """It fails, with an errno or a code of the library's."""
    LIE = 2
    """The event of a batch reports completion, with this error in it."""
    STATUS = 3
    """The event of a batch has this status."""
    CUT = 4
    """It moves so many bytes."""
    MUCH = 5
    """It reports one byte more than was requested."""


class Cancel(IntEnum):
    """Answer of a batch to a cancel."""

    WORKS = 0
    IGNORED = 1
    REFUSED = 2


class StorageFake(Fake):
    """A fake driver with a file library in it: both have ``path``."""

    def __init__(self, name: str) -> None:
        self.name = name
        variant, *parts = STORAGE[name]
        super().__init__(variant, link(name, [*parts, ("storage", 0)]))

    def reset(self, seed: int = 0, late_reads: bool = False, max_delay_us: int = 0) -> None:
        self._declare(ARGUMENTS)
        self.reset_storage(seed)
        super().reset(seed, late_reads, max_delay_us)

    def reset_storage(
        self,
        seed: int = 0,
        max_delay_us: int = 0,
        percent_short: int = 0,
        is_bounced: bool = False,
    ) -> None:
        """Reset to a new library.

        percent_short: share of transfers that move only a part. is_bounced: the machine has no
        direct path, so transfers go through host memory.
        """
        self._library.fake_storage_reset(seed, max_delay_us, percent_short, is_bounced)

    @property
    def library_variable(self) -> str:
        """Name of the variable that gives the product the file library."""
        return f"KVTIER_{self.name.rstrip('0123456789').upper()}_LIBRARY"

    def hold_storage(self) -> None:
        """Begin no transfer until ``let_storage_go``; transfers in flight may end."""
        self._library.fake_storage_hold(1)

    def let_storage_go(self) -> None:
        self._library.fake_storage_hold(0)

    def fail_transfer(self, fault: Fault, value: int = 0, nth: int = 1) -> None:
        """Let the ``nth`` transfer from now fail."""
        self._library.fake_storage_fail(nth, fault, value)

    def cancels(self, how: Cancel) -> None:
        self._library.fake_storage_cancels(how)

    def fail_submit(self, code: int) -> None:
        """The next batch begins, but its submission returns ``code``."""
        self._library.fake_storage_fail_submit(code)

    def limit_pinned(self, kib: int) -> None:
        """Refuse further registrations of memory."""
        self._library.fake_storage_limit_pinned(kib)

    @property
    def num_moving(self) -> int:
        """Return the number of transfers that may still touch memory."""
        return int(self._library.fake_storage_num_moving())

    @property
    def num_transfers(self) -> int:
        """Return the number of transfers begun so far."""
        return int(self._library.fake_storage_num_transfers())

    @property
    def storage_leaks(self) -> list[str]:
        """Return what was not released."""
        return self._lines("fake_storage_leaks")
