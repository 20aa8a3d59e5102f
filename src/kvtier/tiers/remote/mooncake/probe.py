"""Check whether a Mooncake master answers, in a process that can be killed: see ``tier.py``."""

from __future__ import annotations

import os
import sys

BUFFER_BYTES = 16 << 20
"""Bytes of the client's own buffer, which it requires. No segment is contributed."""


def main(address: str, master: str) -> None:
    from mooncake.store import MooncakeDistributedStore

    code = MooncakeDistributedStore().setup(
        address, "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", master
    )
    if code:
        print(f"Mooncake's client says {code}", file=sys.stderr, flush=True)
    os._exit(1 if code else 0)  # its threads need not end one by one


if __name__ == "__main__":
    main(*sys.argv[1:])
