"""Declarations for ctypes agree with the vendors' headers, if a package or a toolkit has them.

CUDA's come with the wheel ``nvidia-cuda-runtime``. Ascend's come with ``torch-npu``, which can't be
installed beside a torch that is to work without CANN: unpack it, and name its include folder in
``KVTIER_ACL_INCLUDE``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.devices import ascend, cuda
from kvtier.devices.library import Call

SITE = Path(sysconfig.get_paths()["purelib"])
CUDA_FOLDERS = [
    *sorted(SITE.glob("nvidia/cu*/include"), reverse=True),
    SITE / "nvidia/cuda_runtime/include",
    Path("/usr/local/cuda/include"),
]
HEAD = """
#include <cstddef>
#include <cstdio>
template <typename Result, typename... Arguments>
void show(const char *name, Result (*)(Arguments...)) {
    std::printf("%s", name);
    ((std::printf(" %zu", sizeof(Arguments))), ...);
    std::printf("\\n");
}
"""


def _include(variable: str, folders: Sequence[Path], header: str) -> Path:
    named = os.environ.get(variable)
    for folder in [Path(named)] if named else folders:
        if (folder / header).is_file():
            return folder
    pytest.skip(f"no {header} on this machine; name a folder that has it in {variable}")


def _printed(tmp_path: Path, include: Path, source: str) -> dict[str, list[int]]:
    """Return a program's output: per line a name and numbers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    file, program = tmp_path / "abi.cpp", tmp_path / "abi"
    file.write_text(source)
    built = subprocess.run(
        [compiler, "-std=c++20", "-w", f"-I{include}", str(file), "-o", str(program), "-c"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    # Only addresses of the functions are named, so nothing has to be there to link with.
    subprocess.run(
        [compiler, str(program), "-o", f"{program}.out", "-Wl,--unresolved-symbols=ignore-all"],
        check=True,
    )
    ran = subprocess.run([f"{program}.out"], check=True, capture_output=True, text=True)
    lines = (line.split() for line in ran.stdout.splitlines())
    return {words[0]: [int(word) for word in words[1:]] for words in lines}


def _sizes(call: Call) -> list[int]:
    return [ctypes.sizeof(argument) for argument in call.arguments]


def _offsets(structure: type[ctypes.Structure]) -> list[int]:
    fields = [getattr(structure, name).offset for name, *_ in structure._fields_]
    return [ctypes.sizeof(structure), *fields]


def _struct(name: str, c_name: str, fields: str) -> str:
    offsets = ", ".join(f"offsetof({c_name}, {field})" for field in fields.split())
    places = " %zu" * len(fields.split())
    return f'std::printf("{name} %zu{places}\\n", sizeof({c_name}), {offsets});\n'


def test_cuda_calls_and_structures_are_those_of_the_header(tmp_path: Path) -> None:
    include = _include("KVTIER_CUDA_INCLUDE", CUDA_FOLDERS, "cuda.h")
    shown = "".join(f'show("{call.name}", &{call.name});\n' for call in cuda.CALLS)
    shown += 'show("batch", PFN_cuMemcpyBatchAsync_v12080{});\n'
    shown += _struct("location", "CUmemLocation", "type id")
    shown += _struct(
        "attributes", "CUmemcpyAttributes", "srcAccessOrder srcLocHint dstLocHint flags"
    )
    shown += _struct(
        "area",
        "CUDA_MEMCPY2D",
        "srcXInBytes srcY srcMemoryType srcHost srcDevice srcArray srcPitch dstXInBytes dstY "
        "dstMemoryType dstHost dstDevice dstArray dstPitch WidthInBytes Height",
    )
    names = {
        "STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
        "EVENT_BLOCKING_SYNC": "CU_EVENT_BLOCKING_SYNC",
        "EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
        "REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
        "REGISTER_MAPPED": "CU_MEMHOSTREGISTER_DEVICEMAP",
        "USE_HOST_POINTER": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
        "NOT_READY": "CUDA_ERROR_NOT_READY",
        "NOT_SUPPORTED": "CUDA_ERROR_NOT_SUPPORTED",
        "MEMORY_HOST": "CU_MEMORYTYPE_HOST",
        "MEMORY_DEVICE": "CU_MEMORYTYPE_DEVICE",
        "ORDER_STREAM": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
        "ORDER_ANY": "CU_MEMCPY_SRC_ACCESS_ORDER_ANY",
    }
    shown += "".join(
        f'std::printf("{ours} %d\\n", (int){theirs});\n' for ours, theirs in names.items()
    )
    found = _printed(
        tmp_path,
        include,
        f"{HEAD}#include <cuda.h>\n#include <cudaTypedefs.h>\nint main() {{\n{shown}}}\n",
    )
    for call in cuda.CALLS:
        assert found[call.name] == _sizes(call), call.name
    assert found["batch"] == _sizes(cuda.BATCH)
    assert found["location"] == _offsets(cuda.CudaLocation)
    assert found["attributes"] == _offsets(cuda.CudaAttributes)
    assert found["area"] == _offsets(cuda.Copy2D)
    for ours in names:
        assert found[ours] == [getattr(cuda, ours)], ours


def test_ascend_calls_and_structures_are_those_of_the_header(tmp_path: Path) -> None:
    include = _include("KVTIER_ACL_INCLUDE", [], "acl/acl_rt.h")
    # With CANN 9.1 the batch call is overloaded in C++: a cast names the one of C.
    batch = (
        "void **, size_t *, void **, size_t *, size_t, aclrtMemcpyBatchAttr *, size_t *, size_t, "
        "size_t *, aclrtStream"
    )
    shown = f'show("{ascend.BATCH}", (aclError (*)({batch}))&{ascend.BATCH});\n'
    for call in ascend.CALLS:
        if call.name != ascend.BATCH:
            shown += f'show("{call.name}", &{call.name});\n'
    shown += _struct("location", "aclrtMemLocation", "id type")
    shown += _struct("attributes", "aclrtMemcpyBatchAttr", "dstLoc srcLoc rsv")
    names = {
        "FAST_LAUNCH": "ACL_STREAM_FAST_LAUNCH",
        "FAST_SYNC": "ACL_STREAM_FAST_SYNC",
        "EVENT_SYNC": "ACL_EVENT_SYNC",
        "EVENT_PROGRESS": "ACL_EVENT_CAPTURE_STREAM_PROGRESS",
        "EVENT_COMPLETE": "ACL_EVENT_RECORDED_STATUS_COMPLETE",
        "HOST_TO_DEVICE": "ACL_MEMCPY_HOST_TO_DEVICE",
        "DEVICE_TO_HOST": "ACL_MEMCPY_DEVICE_TO_HOST",
        "AT_HOST": "ACL_MEM_LOCATION_TYPE_HOST",
        "AT_DEVICE": "ACL_MEM_LOCATION_TYPE_DEVICE",
        "HUGE_PAGES_FIRST": "ACL_MEM_MALLOC_HUGE_FIRST",
        "REGISTER_MAPPED": "ACL_HOST_REGISTER_MAPPED",
        "NOT_SUPPORTED": "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
        "REPEATED_INIT": "ACL_ERROR_REPEAT_INITIALIZE",
    }
    shown += "".join(
        f'std::printf("{ours} %d\\n", (int){theirs});\n' for ours, theirs in names.items()
    )
    found = _printed(tmp_path, include, f'{HEAD}#include "acl/acl.h"\nint main() {{\n{shown}}}\n')
    for call in ascend.CALLS:
        assert found[call.name] == _sizes(call), call.name
    assert found["location"] == _offsets(ascend.AscendLocation)
    assert found["attributes"] == _offsets(ascend.AscendAttributes)
    for ours in names:
        assert found[ours] == [getattr(ascend, ours)], ours
