"""ctypes bindings of Ascend's NDS (NPU Direct Storage). Source: nds_api.h as UCM has it.

NDS can only read and write: it has no vectors, no batches, no registration of memory and no
version. Transfers are not ordered against streams, so the device's fence has to be waited for
first; otherwise half-computed KV would be stored. Addresses, sizes and offsets are multiples of
4 KiB. Deregistering a file takes seconds, so a file is registered once and kept.
"""

from __future__ import annotations

from ctypes import Structure, c_int
from typing import Final

from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.file_library import UNKNOWN, Limits, Vendor, shared_calls

LIBRARY_VARIABLE: Final = "KVTIER_NDS_LIBRARY"


class NdsStatus(Structure):
    """NdsFileError_t."""

    _fields_ = (("code", c_int),)


class NdsDescriptor(Structure):
    """NdsFileDescr_t."""

    _fields_ = (("fd", c_int),)


CALLS = shared_calls("NdsFile", NdsStatus, NdsDescriptor)


NDS = Vendor(
    name="NDS",
    prefix="NdsFile",
    files=(
        "libndsfs.so",
        "libdpc_nds.so",
        "/opt/oceanstor/dataturbo/sdk/lib/libdpc_nds.so",
    ),
    wheel="",
    override=LIBRARY_VARIABLE,
    calls=CALLS,
    descriptor=NdsDescriptor,
    version=lambda library: UNKNOWN,
    limits=lambda library: Limits(),
)


class NdsEngine(DirectEngine):
    """I/O engine for Ascend NPUs. use: ``AscendDriver.use``."""

    name = "nds"
    vendor = NDS
