"""A disk that fails or hangs under kvtier, in each process of a server: ``KVTIER_TEST_DISK``."""

from __future__ import annotations

import errno
import os


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

    def faulty(options: object, group: object, memory: object) -> DiskTier:
        return DiskTier(options, group, memory, disk)  # type: ignore[arg-type]

    opening.DiskTier = faulty  # type: ignore[misc,assignment]
