"""A disk that fails or hangs under kvtier, in each process of a server: ``KVTIER_TEST_DISK``."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.devices import Memory
    from kvtier.layout import KVGroup
    from kvtier.tiers.disk import DiskOptions


def register() -> None:
    """SGLang calls it in each of its processes."""
    fault = os.environ.get("KVTIER_TEST_DISK")
    if not fault:
        return
    from kvtier.connectors.common import opening
    from kvtier.tiers.disk import DiskTier
    from tests.tiers.disk.faulty_disk import FaultyDisk

    disk = FaultyDisk()
    what, how = fault.split()
    if what == "some":
        for nth in range(5, 5000, 5):
            disk.fail("read", nth, errno.EIO, 1)
            disk.fail("write", nth, errno.EIO, 1)
    elif how == "hang":
        disk.hold(what.removesuffix("s"))
    else:
        disk.fail(what.removesuffix("s"), 1, errno.EIO if what == "reads" else errno.ENOSPC, 10_000)

    def faulty(options: DiskOptions, group: KVGroup, memory: Memory) -> DiskTier:
        return DiskTier(options, group, memory, disk)

    vars(opening)["DiskTier"] = faulty
