"""Run ``kvtier serve`` with a disk that fails between SIGUSR1 and SIGUSR2."""

from __future__ import annotations

import signal
import sys

from kvtier.tiers.disk import blocks
from kvtier.tools.cli import app
from tests.tiers.disk import faulty_disk

MANY = 100_000


def main() -> None:
    disk = faulty_disk.FaultyDisk()
    vars(blocks)["DiskSystem"] = lambda: disk

    def go(*_: object) -> None:
        for operation in ("read", "write"):
            disk.fail(operation, count=MANY)

    signal.signal(signal.SIGUSR1, go)
    signal.signal(signal.SIGUSR2, lambda *_: disk.forget_faults())
    app(sys.argv[1:])


if __name__ == "__main__":
    main()
