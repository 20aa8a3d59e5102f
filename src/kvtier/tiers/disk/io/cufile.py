"""ctypes bindings of NVIDIA's cuFile (GPUDirect Storage). Source: cufile.h of cuFile 1.13 to 1.20.

If the machine has no direct path from disk to GPU, cuFile silently goes through buffers in host
memory: its *compatibility mode*. ``probe`` finds out which mode is in use.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_bool, c_int, c_size_t, c_ssize_t, c_uint, c_void_p
from typing import Final

from kvtier.devices.library import Call
from kvtier.tiers.disk.io.batch_queue import batch_calls
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.file_library import (
    UNKNOWN,
    FileDescriptor,
    FileLibrary,
    FileStatus,
    Vector,
    Vendor,
    asked_limits,
    buffer_calls,
    of_system,
    shared_calls,
)

LIBRARY_VARIABLE: Final = "KVTIER_CUFILE_LIBRARY"


class KernelFacts(Structure):
    """``nvfs`` of CUfileDrvProps_t: facts on the kernel module nvidia-fs; all 0 without it."""

    _fields_ = (
        ("major", c_uint),
        ("minor", c_uint),
        ("poll_kib", c_size_t),
        ("max_direct_kib", c_size_t),
        ("status", c_uint),
        ("control", c_uint),
    )


class CuFileProperties(Structure):
    """CUfileDrvProps_t. Sizes in KiB."""

    _fields_ = (
        ("kernel", KernelFacts),
        ("features", c_uint),
        ("max_cache", c_uint),
        ("cache_per_buffer", c_uint),
        ("max_pinned", c_uint),
        ("max_batch", c_uint),
        ("batch_timeout_ms", c_uint),
    )


_VECTORS = (c_void_p, POINTER(Vector), c_size_t, c_ssize_t, c_uint)
_WITHOUT_VECTORS = "batches, or one call per piece"
_SLABS = (POINTER(c_size_t), POINTER(c_size_t), c_int)

CALLS = (
    *shared_calls("cuFile", FileStatus, FileDescriptor),
    Call("cuFileDriverClose_v2", (), without="cuFileDriverClose", returns=FileStatus),
    *buffer_calls("cuFile", FileStatus),
    Call("cuFileDriverGetProperties", (POINTER(CuFileProperties),), returns=FileStatus),
    Call("cuFileGetVersion", (POINTER(c_int),), without="it is old", returns=FileStatus),
    Call(
        "cuFileSetParameterPosixPoolSlabArray",
        _SLABS,
        since="1.15",
        without="smaller batches",
        returns=FileStatus,
    ),
    Call(
        "cuFileSetParameterBool",
        (c_int, c_bool),
        since="1.14",
        without="environment variables",
        returns=FileStatus,
    ),
    *batch_calls("cuFile", "one call per piece"),
    Call("cuFileReadv", _VECTORS, "1.20", _WITHOUT_VECTORS, c_ssize_t),
    Call("cuFileWritev", _VECTORS, "1.20", _WITHOUT_VECTORS, c_ssize_t),
)


def _version(library: FileLibrary) -> tuple[int, int]:
    """Return the version, which the library encodes as 1000 * major + 10 * minor."""
    number = c_int()
    if not library.has("GetVersion") or library.code("GetVersion", byref(number)):
        return UNKNOWN
    return number.value // 1000, number.value % 1000 // 10


CUFILE = Vendor(
    name="cuFile",
    prefix="cuFile",
    files=("libcufile.so.0", "libcufile.so"),
    wheel="nvidia/*/lib/libcufile.so.0",
    override=LIBRARY_VARIABLE,
    calls=CALLS,
    descriptor=of_system,
    version=_version,
    limits=asked_limits(CuFileProperties),
    compat=("CUFILE_ALLOW_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE"),
    log="CUFILE_LOGFILE_PATH",
)


class CuFileEngine(DirectEngine):
    """I/O engine for NVIDIA GPUs. use: ``CudaDriver.use``."""

    name = "cufile"
    vendor = CUFILE
