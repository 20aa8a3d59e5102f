"""Declarations for ctypes agree with the header of the wheel ``nvidia-cufile``.

Another version's may be named in ``KVTIER_CUFILE_INCLUDE``. No package has hipFile's or NDS's.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from kvtier.devices.library import Call
from kvtier.tiers.disk.io import batch_queue, file_library, vendors
from tests.devices import test_abi as abi

HEAD = """
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <cufile.h>
template <typename Result> std::size_t size_of() { return sizeof(Result); }
template <> std::size_t size_of<void>() { return 0; }
template <typename Result, typename... Arguments>
void show(const char *name, Result (*)(Arguments...)) {
    std::printf("%s %zu", name, size_of<Result>());
    ((std::printf(" %zu", sizeof(Arguments))), ...);
    std::printf("\\n");
}
"""
BATCH = "u.batch.devPtr_base u.batch.file_offset u.batch.devPtr_offset u.batch.size"
LIMITS = (
    "per_buffer_cache_size max_device_pinned_mem_size max_batch_io_size max_batch_io_timeout_msecs"
)
STRUCTURES = {
    file_library.FileStatus: ("CUfileError_t", "err cu_err"),
    file_library.FileDescriptor: ("CUfileDescr_t", "type handle fs_ops"),
    file_library.Vector: ("CUfileIOVec_t", "base len"),
    batch_queue.BatchRequest: (
        "CUfileIOParams_t",
        f"mode {BATCH} fh opcode cookie",
    ),
    batch_queue.BatchEvent: ("CUfileIOEvents_t", "cookie status ret"),
    batch_queue.Timespec: ("timespec", "tv_sec tv_nsec"),
    vendors.CuFileProperties: (
        "CUfileDrvProps_t",
        f"nvfs fflags max_device_cache_size {LIMITS}",
    ),
}
KERNEL = (
    "major_version minor_version poll_thresh_size max_direct_io_size dstatusflags dcontrolflags"
)
VALUES = {
    "CU_FILE_SUCCESS": 0,
    "CU_FILE_HANDLE_TYPE_OPAQUE_FD": file_library.OF_SYSTEM,
    "CU_FILE_DRIVER_ALREADY_OPEN": file_library.ALREADY_OPEN,
    "CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE": file_library.ALLOW_COMPAT,
    "CUFILE_PARAM_FORCE_COMPAT_MODE": file_library.FORCE_COMPAT,
    "CUFILE_BATCH": batch_queue.MODE,
    "CUFILE_READ": batch_queue.READ,
    "CUFILE_WRITE": batch_queue.WRITE,
    "CUFILE_WAITING": batch_queue.WAITING,
    "CUFILE_PENDING": batch_queue.PENDING,
    "CUFILE_CANCELED": batch_queue.CANCELED,
    "CUFILE_COMPLETE": batch_queue.COMPLETE,
}
CODES = {
    "CU_FILE_CUDA_POINTER_INVALID": 5012,
    "CU_FILE_CUDA_MEMORY_TYPE_INVALID": 5013,
    "CU_FILE_CUDA_POINTER_RANGE_ERROR": 5014,
    "CU_FILE_INVALID_VALUE": 5022,
    "CU_FILE_MEMORY_NOT_REGISTERED": 5024,
    "CU_FILE_PERMISSION_DENIED": 5025,
    "CU_FILE_HANDLE_NOT_REGISTERED": 5027,
    "CU_FILE_NOMEM_ERROR": 5043,
}
"""Constants that stand for an errno, by name."""
REFUSALS = {"CU_FILE_INVALID_VALUE": 5022, "CU_FILE_BATCH_FULL": 5037}


def _size(result: object) -> int:
    return 0 if result is None else ctypes.sizeof(result)  # type: ignore[arg-type]


def _sizes(call: Call) -> list[int]:
    return [_size(call.returns), *(ctypes.sizeof(argument) for argument in call.arguments)]


def test_calls_structures_and_values_are_those_of_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = abi._include("KVTIER_CUFILE_INCLUDE", abi.CUDA_FOLDERS, "cufile.h")
    cuda = abi._include("KVTIER_CUDA_INCLUDE", abi.CUDA_FOLDERS, "cuda.h")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(cuda))
    text = (include / "cufile.h").read_text()

    def has(name: str) -> bool:
        return re.search(rf"\b{name}\b", text) is not None

    calls = [call for call in vendors.CUFILE_CALLS if has(call.name)]
    assert {call.name for call in vendors.CUFILE_CALLS if not call.since} <= {
        call.name for call in calls
    }
    shown = "".join(f'show("{call.name}", &{call.name});\n' for call in calls)
    for ours, (name, fields) in STRUCTURES.items():
        if name == "timespec" or has(name):
            shown += abi._struct(ours.__name__, name, fields)
    kernel = " ".join(f"nvfs.{field}" for field in KERNEL.split())
    shown += abi._struct("kernel", "CUfileDrvProps_t", kernel)
    codes = {name: code for name, code in (CODES | REFUSALS).items() if has(name)}
    assert len(codes) >= 8, "older ones lack a few"
    values = VALUES | codes
    shown += "".join(f'std::printf("{name} %d\\n", (int){name});\n' for name in values)
    found = abi._printed(tmp_path, include, f"{HEAD}int main() {{\n{shown}}}\n")
    for call in calls:
        assert found[call.name] == _sizes(call), call.name
    for ours, (name, _) in STRUCTURES.items():
        if name == "timespec" or has(name):
            assert found[ours.__name__] == abi._offsets(ours), name
    assert found["kernel"][1:] == abi._offsets(vendors.KernelFacts)[1:]
    for name, value in values.items():
        assert found[name] == [value], name
    assert set(CODES.values()) == set(file_library.ERRNOS)
    assert set(REFUSALS.values()) == batch_queue.REFUSED
