"""ctypes bindings of AMD's hipFile, which resembles cuFile. Source: hipfile.h of hipFile 0.2.

Differences: its properties have 64 bits, its version has three numbers, and it has no vectored
calls. Batches are not used, because up to 0.3 submitted ones get no answer; each piece is one call.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_uint, c_uint64
from typing import Final

from kvtier.devices.library import Call
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.file_library import (
    UNKNOWN,
    FileDescriptor,
    FileLibrary,
    FileStatus,
    Vendor,
    asked_limits,
    buffer_calls,
    of_system,
    shared_calls,
)

LIBRARY_VARIABLE: Final = "KVTIER_HIPFILE_LIBRARY"


class HipKernelFacts(Structure):
    """``nvfs`` of hipFileDriverProps_t."""

    _fields_ = (
        ("major", c_uint),
        ("minor", c_uint),
        ("poll_kib", c_uint64),
        ("max_direct_kib", c_uint64),
        ("status", c_uint),
        ("control", c_uint),
    )


class HipFileProperties(Structure):
    """hipFileDriverProps_t. Sizes in KiB."""

    _fields_ = (
        ("kernel", HipKernelFacts),
        ("features", c_uint),
        ("max_cache", c_uint64),
        ("cache_per_buffer", c_uint64),
        ("max_pinned", c_uint64),
        ("max_batch", c_uint),
        ("batch_timeout_ms", c_uint),
    )


_NUMBER = POINTER(c_uint)
CALLS = (
    *shared_calls("hipFile", FileStatus, FileDescriptor),
    *buffer_calls("hipFile", FileStatus),
    Call("hipFileDriverGetProperties", (POINTER(HipFileProperties),), returns=FileStatus),
    Call("hipFileGetVersion", (_NUMBER, _NUMBER, _NUMBER), without="it is old", returns=FileStatus),
)


def _version(library: FileLibrary) -> tuple[int, int]:
    numbers = c_uint(), c_uint(), c_uint()
    if not library.has("GetVersion") or library.code("GetVersion", *map(byref, numbers)):
        return UNKNOWN
    return numbers[0].value, numbers[1].value


HIPFILE = Vendor(
    name="hipFile",
    prefix="hipFile",
    files=("libhipfile.so", "libhipfile.so.0"),
    wheel="",
    override=LIBRARY_VARIABLE,
    calls=CALLS,
    descriptor=of_system,
    version=_version,
    limits=asked_limits(HipFileProperties),
    compat=("HIPFILE_ALLOW_COMPAT_MODE", "HIPFILE_FORCE_COMPAT_MODE"),
)


class HipFileEngine(DirectEngine):
    """I/O engine for AMD GPUs. use: ``HipDriver.use``."""

    name = "hipfile"
    vendor = HIPFILE
