"""Table of vendors' file libraries and the accelerators that they reach."""

from __future__ import annotations

from typing import Final

from kvtier.tiers.disk.io.cufile import CuFileEngine
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.hipfile import HipFileEngine
from kvtier.tiers.disk.io.nds import NdsEngine

KINDS: Final[dict[str, tuple[type[DirectEngine], str]]] = {
    "cufile": (CuFileEngine, "cuda"),
    "hipfile": (HipFileEngine, "hip"),
    "nds": (NdsEngine, "ascend"),
}
"""By library (``Device.file_library``): its engine, and the plug-in of the device whose memory it
reaches."""
