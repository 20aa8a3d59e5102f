"""Vendors' file libraries: their calls, and the accelerators that they reach.

cuFile is NVIDIA's (GPUDirect Storage). Source: cufile.h of cuFile 1.13 to 1.20. If the machine has
no direct path from disk to GPU, cuFile silently goes through buffers in host memory: its
*compatibility mode*. ``probe`` finds out which mode is in use.

hipFile is AMD's, and resembles cuFile. Source: hipfile.h of hipFile 0.2. Its properties have 64
bits, its version has three numbers, and it has no vectored calls. Batches are not used, because up
to 0.3 submitted ones get no answer; each piece is one call.

NDS (NPU Direct Storage) is Ascend's. Source: nds_api.h as UCM has it. It can only read and write:
it has no vectors, no batches, no registration of memory and no version. Transfers are not ordered
against streams, so the device's fence has to be waited for first; otherwise half-computed KV would
be stored. Addresses, sizes and offsets are multiples of 4 KiB. Deregistering a file takes seconds,
so a file is registered once and kept.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_int,
    c_size_t,
    c_ssize_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Final

from kvtier.devices.library import Call
from kvtier.tiers.disk.io.batch_queue import BATCH_CALLS
from kvtier.tiers.disk.io.file_library import (
    OF_SYSTEM,
    UNKNOWN,
    FileDescriptor,
    FileLibrary,
    FileName,
    FileStatus,
    Vector,
    Vendor,
)


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


class HipFileProperties(Structure):
    """hipFileDriverProps_t. Sizes in KiB."""

    _fields_ = (
        ("kernel", KernelFacts),
        ("features", c_uint),
        ("max_cache", c_uint64),
        ("cache_per_buffer", c_uint64),
        ("max_pinned", c_uint64),
        ("max_batch", c_uint),
        ("batch_timeout_ms", c_uint),
    )


class NdsStatus(Structure):
    """NdsFileError_t."""

    _fields_ = (("code", c_int),)


class NdsDescriptor(Structure):
    """NdsFileDescr_t."""

    _fields_ = (("fd", c_int),)


def of_system(fd: int) -> FileDescriptor:
    """Return the description of a file that is open in this process."""
    return FileDescriptor(OF_SYSTEM, FileName(fd=fd))


def shared_calls(
    prefix: str, status: type[Structure], descriptor: type[Structure]
) -> tuple[Call, ...]:
    """Return the required calls, which all libraries have."""
    move = (c_void_p, c_void_p, c_size_t, c_ssize_t, c_ssize_t)
    handle = POINTER(c_void_p)
    return (
        Call(f"{prefix}DriverOpen", (), returns=status),
        Call(f"{prefix}DriverClose", (), returns=status),
        Call(f"{prefix}HandleRegister", (handle, POINTER(descriptor)), returns=status),
        Call(f"{prefix}HandleDeregister", (c_void_p,), returns=None),
        Call(f"{prefix}Read", move, returns=c_ssize_t),
        Call(f"{prefix}Write", move, returns=c_ssize_t),
    )


def buffer_calls(prefix: str, status: type[Structure]) -> tuple[Call, ...]:
    """Return the calls of libraries that require registration of memory."""
    return (
        Call(f"{prefix}BufRegister", (c_void_p, c_size_t, c_int), returns=status),
        Call(f"{prefix}BufDeregister", (c_void_p,), returns=status),
        Call(
            f"{prefix}DriverSetMaxPinnedMemSize",
            (c_size_t,),
            without="no more memory than its configuration allows",
            returns=status,
        ),
    )


_VECTORS = (c_void_p, POINTER(Vector), c_size_t, c_ssize_t, c_uint)
_WITHOUT_VECTORS = "batches, or one call per piece"
_SLABS = (POINTER(c_size_t), POINTER(c_size_t), c_int)
_NUMBER = POINTER(c_uint)

CUFILE_CALLS = (
    *shared_calls("cuFile", FileStatus, FileDescriptor),
    Call("cuFileDriverClose_v2", (), without="cuFileDriverClose", returns=FileStatus),
    *buffer_calls("cuFile", FileStatus),
    Call("cuFileDriverGetProperties", (POINTER(CuFileProperties),), returns=FileStatus),
    Call("cuFileGetVersion", (POINTER(c_int),), without="it is old", returns=FileStatus),
    Call("cuFileSetParameterPosixPoolSlabArray", _SLABS, "1.15", "smaller batches", FileStatus),
    Call("cuFileSetParameterBool", (c_int, c_bool), "1.14", "environment variables", FileStatus),
    *BATCH_CALLS,
    Call("cuFileReadv", _VECTORS, "1.20", _WITHOUT_VECTORS, c_ssize_t),
    Call("cuFileWritev", _VECTORS, "1.20", _WITHOUT_VECTORS, c_ssize_t),
)
HIPFILE_CALLS = (
    *shared_calls("hipFile", FileStatus, FileDescriptor),
    *buffer_calls("hipFile", FileStatus),
    Call("hipFileDriverGetProperties", (POINTER(HipFileProperties),), returns=FileStatus),
    Call("hipFileGetVersion", (_NUMBER, _NUMBER, _NUMBER), without="it is old", returns=FileStatus),
)


def _cufile_version(library: FileLibrary) -> tuple[int, int]:
    """Return the version, which the library encodes as 1000 * major + 10 * minor."""
    number = c_int()
    if not library.has("GetVersion") or library.code("GetVersion", byref(number)):
        return UNKNOWN
    return number.value // 1000, number.value % 1000 // 10


def _hipfile_version(library: FileLibrary) -> tuple[int, int]:
    numbers = c_uint(), c_uint(), c_uint()
    if not library.has("GetVersion") or library.code("GetVersion", *map(byref, numbers)):
        return UNKNOWN
    return numbers[0].value, numbers[1].value


VENDORS: Final = {
    "cufile": Vendor(
        name="cuFile",
        device="cuda",
        prefix="cuFile",
        files=("libcufile.so.0", "libcufile.so"),
        override="KVTIER_CUFILE_LIBRARY",
        calls=CUFILE_CALLS,
        descriptor=of_system,
        wheel="nvidia/*/lib/libcufile.so.0",
        version=_cufile_version,
        properties=CuFileProperties,
        compat=("CUFILE_ALLOW_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE"),
        log="CUFILE_LOGFILE_PATH",
    ),
    "hipfile": Vendor(
        name="hipFile",
        device="hip",
        prefix="hipFile",
        files=("libhipfile.so", "libhipfile.so.0"),
        override="KVTIER_HIPFILE_LIBRARY",
        calls=HIPFILE_CALLS,
        descriptor=of_system,
        version=_hipfile_version,
        properties=HipFileProperties,
        compat=("HIPFILE_ALLOW_COMPAT_MODE", "HIPFILE_FORCE_COMPAT_MODE"),
    ),
    "nds": Vendor(
        name="NDS",
        device="ascend",
        prefix="NdsFile",
        files=(
            "libndsfs.so",
            "libdpc_nds.so",
            "/opt/oceanstor/dataturbo/sdk/lib/libdpc_nds.so",
        ),
        override="KVTIER_NDS_LIBRARY",
        calls=shared_calls("NdsFile", NdsStatus, NdsDescriptor),
        descriptor=NdsDescriptor,
    ),
}
"""By library, as ``Device.file_library`` names it."""
