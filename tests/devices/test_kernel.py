"""The kernel for small copies: its program on the CPU, and its launches over the fake driver."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.devices import Direction
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.kernel import ALIGNMENT, NAME, TABLE_COPIES
from kvtier.devices.path_table import Measured, PathTable
from kvtier.devices.paths import CopyPath
from kvtier.devices.rig import open_rig
from scripts.ptx import DEVICES, digest
from tests.devices.drivers import make_device
from tests.kit.fakes.fake import Fake

SOURCE = DEVICES / f"{NAME}.cu"
ON_CPU = """
#include <cstdint>
#define __global__
#define __launch_bounds__(n)
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
template <class T> static T __ldcs(const T *from) { return *from; }
template <class T> static void __stcs(T *to, T value) { *to = value; }
#include "copy_fragments.cu"
extern "C" void run(const Word *dst, const Word *src, const Word *size, unsigned count,
                    unsigned num_blocks, unsigned num_threads) {
    gridDim.x = num_blocks;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < num_threads; ++threadIdx.x)
            copy_fragments(dst, src, size, count);
}
"""


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size]


def test_ptx_was_made_from_the_source() -> None:
    first = SOURCE.with_suffix(".ptx").read_text().splitlines()[0]
    assert first == digest(SOURCE), "run python -m scripts.ptx"


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_kernel_moves_every_byte_and_no_other(tmp_path: Path, num_blocks: int) -> None:
    (tmp_path / "run.cpp").write_text(ON_CPU)
    library = tmp_path / "run.so"
    compiler = ("g++", "-O1", "-shared", "-fPIC", "-w", f"-I{SOURCE.parent}", "-o", str(library))
    subprocess.run([*compiler, str(tmp_path / "run.cpp")], check=True)
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 1500, 140) * ALIGNMENT  # below, at and above one step of a warp
    order = rng.permutation(len(sizes))  # the pieces lie in another order in the destination
    src_begin, dst_begin = np.cumsum(sizes) - sizes, np.empty_like(sizes)
    dst_begin[order] = np.cumsum(sizes[order] + ALIGNMENT) - sizes[order]
    src, dst = (_aligned(int(sizes.sum()) + (len(sizes) + 1) * ALIGNMENT) for _ in range(2))
    src[:] = rng.integers(0, 256, len(src), np.uint8)
    expected = np.zeros_like(dst)
    for at, to, size in zip(src_begin.tolist(), dst_begin.tolist(), sizes.tolist(), strict=True):
        expected[to : to + size] = src[at : at + size]
    columns = [dst_begin + dst.ctypes.data, src_begin + src.ctypes.data, sizes]
    table = np.stack(columns).astype(np.uint64)
    rows = (ctypes.c_void_p(row.ctypes.data) for row in table)
    ctypes.CDLL(str(library)).run(*rows, len(sizes), num_blocks, 1024)
    assert np.array_equal(dst, expected)


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake("cuda130")
    yield fake
    assert fake.violations == []
    assert fake.leaks == []


@pytest.fixture
def device(fake: Fake) -> Iterator[DriverDevice]:
    fake.reset(seed=5, late_reads=True, max_delay_us=50)
    device = make_device(fake)
    yield device
    device.close()


@pytest.mark.parametrize("direction", Direction)
def test_launches_copy_the_right_bytes_from_tables_used_again(
    fake: Fake, device: DriverDevice, direction: Direction
) -> None:
    copy = device.ways()[CopyPath.KERNEL.value]
    with open_rig(device, 4 << 20) as rig:
        for count in (3, 200, TABLE_COPIES + 100, 200):
            assert rig.brings_the_right_bytes(copy, device.copy, direction, 256, count)
    locked = fake.count("cuMemHostRegister_v2")
    assert locked == 1 + 2  # the rig's memory, and the tables of two launches at a time
    assert fake.count("cuLaunchKernel") == 5


def test_tables_of_launches_under_way_are_not_written_again(
    fake: Fake, device: DriverDevice
) -> None:
    queue = device.stream_queue(Direction.LOAD)
    with open_rig(device, 4 << 20) as rig:
        rng = np.random.default_rng(3)
        view = np.frombuffer(rig.host.owner, np.uint8)  # type: ignore[call-overload]
        view[:] = rng.integers(0, 256, len(view), np.uint8)
        expected = view.copy()
        fake.hold()
        whole = [rig.contiguous(Direction.LOAD, 4096 * count) for count in (1, 2, 3)]
        for batch in whole:
            queue.submit(batch, CopyPath.KERNEL)
        fake.release()
        queue.fence().wait()
        view[:] = 0
        device.copy(rig.contiguous(Direction.STORE, 3 * 4096), Direction.STORE)
        assert np.array_equal(view[: 3 * 4096], expected[: 3 * 4096])
    assert fake.count("cuLaunchKernel") == 3


def test_memory_that_is_not_page_locked_is_not_given_to_the_kernel(
    fake: Fake, device: DriverDevice
) -> None:
    rows = tuple(Measured(each, CopyPath.KERNEL, 512, 64, 9e9) for each in Direction)
    device.paths.rank(PathTable(rows, frozenset(CopyPath)))
    with open_rig(device, 1 << 20) as rig:
        device.copy(rig.scattered(Direction.LOAD, 512, 64), Direction.LOAD)
        assert fake.count("cuLaunchKernel") == 1
        device.unlock(rig.host)
        device.copy(rig.scattered(Direction.LOAD, 512, 64), Direction.LOAD)
        assert fake.count("cuLaunchKernel") == 1
        assert device.page_lock(rig.host)


def test_long_copies_are_left_to_copy_engines(fake: Fake, device: DriverDevice) -> None:
    rows = (
        Measured(Direction.LOAD, CopyPath.KERNEL, 65536, 16, 9e9),
        Measured(Direction.LOAD, CopyPath.BATCH, 65536, 16, 8e9),
    )
    device.paths.rank(PathTable(rows, frozenset(CopyPath)))
    with open_rig(device, 8 << 20) as rig:
        device.copy(rig.scattered(Direction.LOAD, 64 << 10, 16), Direction.LOAD)
        assert fake.count("cuLaunchKernel") == 1
        device.copy(rig.scattered(Direction.LOAD, 256 << 10, 16), Direction.LOAD)
        assert fake.count("cuLaunchKernel") == 1
        assert fake.count("cuMemcpyBatchAsync") == 1


def test_gpu_that_refuses_the_kernel_copies_without_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.reset(seed=1)
    fake.fail_call("cuModuleLoadData", code=218)
    device = make_device(fake)
    assert CopyPath.KERNEL not in device.paths.usable
    with open_rig(device, 1 << 20) as rig:
        assert rig.brings_the_right_bytes(device.copy, device.copy, Direction.LOAD, 256, 64)
    device.close()


def test_table_that_the_other_direction_took_is_replaced(
    fake: Fake, device: DriverDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class JustEmptied(list[object]):
        """A list from which another thread took the last item after this one had looked."""

        def __bool__(self) -> bool:
            return True

    kernel = device.paths._kernel
    assert kernel is not None
    monkeypatch.setattr(kernel, "_free", JustEmptied())
    with open_rig(device, 1 << 20) as rig:
        copy = device.ways()[CopyPath.KERNEL.value]
        assert rig.brings_the_right_bytes(copy, device.copy, Direction.LOAD, 256, 64)
