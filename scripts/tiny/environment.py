"""Settings that the C library and OpenMP read when a process starts."""

from __future__ import annotations

import os
import sys

# Large tensors stay in the heap (no page faults in every step). Idle threads sleep: spinning ones
# cost a factor of four when another process wants a core.
SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
}


def restart_with_settings() -> None:
    """Start this program again with ``SETTINGS``, unless it has them already."""
    if any(os.environ.get(key) != value for key, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
