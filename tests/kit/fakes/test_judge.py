"""The fakes notice every call that hardware might punish. Tests call them as drivers are called."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest

from kvtier.devices import ascend, cuda
from tests.kit.fakes.fake import VARIANTS, Fake

SIZE = 1 << 16


class Cuda:
    """A thread with a context, a stream, device memory and page-locked memory of a fake CUDA."""

    def __init__(self, late_reads: bool = False) -> None:
        self.fake = Fake("cuda130")
        self.fake.reset(late_reads=late_reads)
        self.calls = self.fake.library
        assert self.calls.cuInit(0) == 0
        context = c_void_p()
        assert self.calls.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
        assert self.calls.cuCtxSetCurrent(context) == 0
        self.stream, self.other = self.make_stream(), self.make_stream()
        self.device = self.fake.allocate(SIZE)
        self.arena = mmap.mmap(-1, SIZE)
        self.host = np.frombuffer(self.arena, np.uint8).ctypes.data
        assert self.calls.cuMemHostRegister_v2(c_void_p(self.host), c_size_t(SIZE), 3) == 0

    def make_stream(self) -> c_void_p:
        stream = c_void_p()
        assert self.calls.cuStreamCreate(byref(stream), 1) == 0
        return stream

    def event(self, stream: c_void_p) -> c_void_p:
        event = c_void_p()
        assert self.calls.cuEventCreate(byref(event), 3) == 0
        assert self.calls.cuEventRecord(event, stream) == 0
        return event

    def load(self, to: int, at: int, size: int, stream: c_void_p | None = None) -> int:
        """Load between offsets in device and host memory."""
        code: int = self.calls.cuMemcpyHtoDAsync_v2(
            c_uint64(self.device + to), c_void_p(self.host + at), c_size_t(size),
            stream or self.stream,
        )  # fmt: skip
        return code

    def batch(
        self,
        copies: list[tuple[int, int, int]],
        order: int = 3,
        indices: tuple[int, ...] = (0,),
        stream: c_void_p | None = None,
        num_attributes: int = 1,
    ) -> int:
        """Submit loads of (device offset, host offset, size)."""
        table = np.array(copies, np.uint64).reshape(-1, 3)
        self.arrays = [
            np.ascontiguousarray(table[:, 0] + np.uint64(self.device)),
            np.ascontiguousarray(table[:, 1] + np.uint64(self.host)),
            np.ascontiguousarray(table[:, 2]),
        ]
        attributes = (cuda.CudaAttributes * 2)(
            cuda.CudaAttributes(order), cuda.CudaAttributes(order)
        )
        code: int = self.calls.cuMemcpyBatchAsync(
            *(c_void_p(array.ctypes.data) for array in self.arrays), c_size_t(len(copies)),
            attributes, (c_size_t * 2)(*indices, *([0] * (2 - len(indices)))),
            c_size_t(num_attributes), byref(c_size_t()),
            self.stream if stream is None else stream,
        )  # fmt: skip
        return code

    def synchronize(self) -> int:
        code: int = self.calls.cuStreamSynchronize(self.stream)
        return code


@pytest.fixture
def gpu() -> Cuda:
    return Cuda()


def test_nothing_is_copied_when_it_is_submitted(gpu: Cuda) -> None:
    gpu.fake.hold()
    gpu.arena[:4] = b"data"
    assert gpu.load(0, 0, 4) == 0
    assert gpu.fake.num_pending == 1
    assert not gpu.fake.peek(gpu.device, 4).any()
    gpu.fake.release()
    assert gpu.synchronize() == 0
    assert gpu.fake.peek(gpu.device, 4).tobytes() == b"data"
    assert gpu.fake.violations == []


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda gpu: gpu.batch([(0, 0, 8)], stream=c_void_p(0)), 1),
        (lambda gpu: gpu.batch([(0, 0, 8)], order=0), 1),
        (lambda gpu: gpu.batch([(0, 0, 8)], indices=(1,)), 1),
        (lambda gpu: gpu.batch([(0, 0, 8), (8, 8, 8)], indices=(0, 0), num_attributes=2), 1),
        (lambda gpu: gpu.batch([(0, 0, 8)], num_attributes=2), 1),
        (lambda gpu: gpu.batch([(0, 0, 8)], num_attributes=0), 1),
        (lambda gpu: gpu.batch([(0, 0, 0)]), 1),
        (lambda gpu: gpu.batch([(SIZE, 0, 8)]), 1),
        (lambda gpu: gpu.batch([(SIZE - 4, 0, 8)]), 1),
        (lambda gpu: gpu.load(0, SIZE - 4, 8), 1),
        (lambda gpu: gpu.load(0, 0, 8, c_void_p(12345)), 400),
    ],
)
def test_wrong_arguments_are_refused(gpu: Cuda, wrong: Callable[[Cuda], int], code: int) -> None:
    assert wrong(gpu) == code
    assert gpu.fake.num_pending == 0


def test_calls_on_a_thread_without_a_context_are_refused(gpu: Cuda) -> None:
    assert gpu.calls.cuCtxSetCurrent(c_void_p(0)) == 0
    assert gpu.load(0, 0, 8) == 201
    assert gpu.synchronize() == 201


def _race(gpu: Cuda) -> None:
    gpu.load(0, 0, 64)
    gpu.load(32, 64, 64, gpu.other)


def _race_with_compute(gpu: Cuda) -> None:
    gpu.fake.fill(gpu.device, 8, 1, gpu.fake.compute_stream())
    gpu.load(0, 0, 64)


def _unregister(gpu: Cuda) -> None:
    gpu.load(0, 0, 64)
    gpu.calls.cuMemHostUnregister(c_void_p(gpu.host))


def _free(gpu: Cuda) -> None:
    gpu.load(0, 0, 64)
    gpu.fake.free(gpu.device)


def _store_out_of_order(gpu: Cuda) -> None:
    to = (c_uint64 * 1)(gpu.host)
    at = (c_uint64 * 1)(gpu.device)
    gpu.calls.cuMemcpyBatchAsync(
        to, at, (c_size_t * 1)(8), c_size_t(1), byref(cuda.CudaAttributes(3)), byref(c_size_t(0)),
        c_size_t(1), byref(c_size_t()), gpu.stream,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda gpu: gpu.batch([(0, 0, 8), (4, 16, 8)]), "write the same bytes"),
        (_race, "in no order"),
        (_race_with_compute, "in no order"),
        (_unregister, "unregistered while a copy"),
        (_free, "freed while a copy"),
        (lambda gpu: gpu.load(0, SIZE - 8, 16), "leaves the piece"),
        (lambda gpu: gpu.load(0, 0, 8, c_void_p(1)), "legacy stream"),
        (lambda gpu: gpu.calls.cuStreamCreate(byref(c_void_p()), 0), "waits for the legacy one"),
        (_store_out_of_order, "need not wait"),
        (lambda gpu: gpu.batch([(at, at, 1) for at in range(52_000)]), "more copies in a batch"),
    ],
)
def test_what_hardware_might_punish_is_written_down(
    gpu: Cuda, what: Callable[[Cuda], object], told: str
) -> None:
    gpu.fake.hold()
    what(gpu)
    assert any(told in line for line in gpu.fake.violations), gpu.fake.violations


def test_streams_that_are_ordered_by_an_event_do_not_race(gpu: Cuda) -> None:
    gpu.fake.hold()
    gpu.load(0, 0, 64)
    event = gpu.event(gpu.stream)
    assert gpu.calls.cuStreamWaitEvent(gpu.other, event, 0) == 0
    gpu.load(32, 64, 64, gpu.other)
    assert gpu.fake.violations == []


def test_arrays_that_change_too_early_are_noticed() -> None:
    gpu = Cuda(late_reads=True)
    gpu.fake.hold()
    assert gpu.batch([(0, 0, 8), (8, 8, 8)]) == 0
    gpu.arrays[2][0] = 4
    gpu.fake.release()
    assert gpu.synchronize() == 0
    assert any("changed before it was done" in line for line in gpu.fake.violations)


def test_pageable_memory_is_copied_at_once_and_counted(gpu: Cuda) -> None:
    pageable = np.arange(64, dtype=np.uint8)
    code = gpu.calls.cuMemcpyHtoDAsync_v2(
        c_uint64(gpu.device), c_void_p(pageable.ctypes.data), c_size_t(64), gpu.stream
    )
    assert code == 0
    assert gpu.fake.num_pending == 0
    assert gpu.fake.count("synchronous_copies") == 1
    np.testing.assert_array_equal(gpu.fake.peek(gpu.device, 64), pageable)


def test_waiting_for_an_event_that_was_never_recorded_is_nothing(gpu: Cuda) -> None:
    event = c_void_p()
    assert gpu.calls.cuEventCreate(byref(event), 3) == 0
    assert gpu.calls.cuStreamWaitEvent(gpu.stream, event, 0) == 0
    assert gpu.load(0, 0, 8) == 0
    assert gpu.synchronize() == 0


def test_what_is_not_given_back_is_named(gpu: Cuda) -> None:
    leaks = gpu.fake.leaks
    assert leaks.count("a stream") == 2
    assert f"a registration of {SIZE} bytes" in leaks
    assert f"an allocation of {SIZE} bytes" in leaks


def test_injected_faults_happen_when_they_should(gpu: Cuda) -> None:
    gpu.fake.fail_call("cuMemcpyHtoDAsync_v2", 719, nth=2)
    assert [gpu.load(at, at, 8) for at in (0, 8, 16)] == [0, 719, 0]
    gpu.fake.fail_entry(1, 801)
    assert gpu.batch([(64, 64, 8), (72, 72, 8)]) == 801
    assert gpu.synchronize() == 0
    gpu.fake.fail_late(700, nth_copy=2)
    assert gpu.batch([(64, 64, 8), (72, 72, 8)]) == 0
    assert gpu.synchronize() == 700
    assert gpu.synchronize() == 700, "a broken context stays broken"
    gpu.fake.lose_device(999)
    assert gpu.load(0, 0, 8) == 999


def test_host_code_that_reads_device_memory_crashes() -> None:
    program = (
        "import ctypes; from tests.kit.fakes.fake import Fake;"
        "ctypes.string_at(Fake('cuda130').allocate(4096), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, env=os.environ
    )
    assert done.returncode == -signal.SIGSEGV


# -- the others ------------------------------------------------------------------------------------


@pytest.fixture
def npu() -> Iterator[Fake]:
    fake = Fake("cann85")
    assert fake.library.aclInit(None) == 0
    assert fake.library.aclInit(None) == 100002
    assert fake.library.aclrtSetDevice(0) == 0
    yield fake
    fake.reset()


AT_HOST, AT_DEVICE = ascend.AscendLocation(0, 0), ascend.AscendLocation(0, 1)


def _acl_batch(
    fake: Fake,
    attributes: ascend.AscendAttributes,
    room: int = 8,
    size: int = 8,
    second_size: int = 8,
    has_failed: bool = True,
    at_device: bool = False,
) -> tuple[int, int]:
    """Submit two copies; return the code and the failing entry."""
    stream = c_void_p()
    assert fake.library.aclrtCreateStreamWithConfig(byref(stream), 0, 3) == 0
    host, device = np.zeros(64, np.uint8), fake.allocate(64)
    src = device + 32 if at_device else host.ctypes.data
    failed = c_size_t(0)
    code = fake.library.aclrtMemcpyBatchAsync(
        (c_void_p * 2)(device, device + 8), (c_size_t * 2)(room, 8),
        (c_void_p * 2)(src, src + 8), (c_size_t * 2)(size, second_size), c_size_t(2),
        byref(attributes), byref(c_size_t(0)), c_size_t(1),
        byref(failed) if has_failed else None, stream,
    )  # fmt: skip
    return code, failed.value


def _reserved() -> ascend.AscendAttributes:
    attributes = ascend.AscendAttributes(AT_DEVICE, AT_HOST)
    attributes.reserved[3] = 1
    return attributes


@pytest.mark.parametrize(
    ("attributes", "changes", "code"),
    [
        (ascend.AscendAttributes(AT_DEVICE, AT_HOST), {}, 0),
        (ascend.AscendAttributes(AT_HOST, AT_DEVICE), {}, 107000),  # source and destination swapped
        (
            ascend.AscendAttributes(ascend.AscendLocation(1, 0), AT_HOST),
            {},
            107000,
        ),  # id and type swapped
        (
            ascend.AscendAttributes(ascend.AscendLocation(1, 1), AT_HOST),
            {},
            107000,
        ),  # another device
        (ascend.AscendAttributes(AT_DEVICE, ascend.AscendLocation(0, 4)), {}, 107000),  # HOST_NUMA
        (ascend.AscendAttributes(AT_DEVICE, AT_DEVICE), {"at_device": True}, 107000),
        (ascend.AscendAttributes(AT_DEVICE, AT_HOST), {"room": 4}, 100000),
        (ascend.AscendAttributes(AT_DEVICE, AT_HOST), {"has_failed": False}, 100000),
        (ascend.AscendAttributes(AT_DEVICE, AT_HOST), {"second_size": 0}, 107000),
        (_reserved(), {}, 100000),
    ],
)
def test_cann_judges_a_batch(
    npu: Fake, attributes: ascend.AscendAttributes, changes: dict[str, Any], code: int
) -> None:
    answered, failed = _acl_batch(npu, attributes, **changes)
    assert answered == code
    if "second_size" in changes:
        assert failed == 1


def test_cann_registers_whole_pages_only(npu: Fake) -> None:
    arena = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    begin = np.frombuffer(arena, np.uint8).ctypes.data
    register = npu.library.aclrtHostRegisterV2
    assert register(c_void_p(begin + 8), c_uint64(4096), 0x10000000) == 107000
    assert register(c_void_p(begin), c_uint64(100), 0x10000000) == 107000
    assert register(c_void_p(begin), c_uint64(4096), 0x10000000) == 0
    assert register(c_void_p(begin), c_uint64(8192), 0x10000000) == 107000, "twice"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_version_has_the_calls_that_it_should(variant: str) -> None:
    library = Fake(variant).library
    has = {
        name: hasattr(library, name)
        for name in (
            "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "aclrtMemcpyBatchAsync",
            "aclrtMemcpyBatchAsyncV2", "aclrtHostRegisterV2", "hipMemcpyBatchAsync",
        )
    }  # fmt: skip
    assert {name for name, there in has.items() if there} == {
        "cuda122": set(),
        "cuda128": {"cuMemcpyBatchAsync"},
        "cuda130": {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"},
        "cann83": set(),
        "cann85": {"aclrtMemcpyBatchAsync", "aclrtHostRegisterV2"},
        "cann91": {"aclrtMemcpyBatchAsync", "aclrtMemcpyBatchAsyncV2", "aclrtHostRegisterV2"},
        "hip70": set(),
        "hip72": {"hipMemcpyBatchAsync"},
        "hip713": {"hipMemcpyBatchAsync"},
    }[variant]
    assert ctypes.sizeof(cuda.CudaAttributes) == 24


@pytest.mark.parametrize(
    ("variant", "num_attributes", "code"), [("hip72", 1, 801), ("hip713", 0, 1)]
)
def test_hip_wants_attributes_from_7_13_on_and_refuses_them_before(
    variant: str, num_attributes: int, code: int
) -> None:
    fake = Fake(variant)
    stream = c_void_p()
    assert fake.library.hipStreamCreateWithFlags(byref(stream), 1) == 0
    host, device = np.zeros(8, np.uint8), fake.allocate(8)
    for count in (num_attributes, 1 - num_attributes):
        answered = fake.library.hipMemcpyBatchAsync(
            (c_void_p * 1)(device), (c_void_p * 1)(host.ctypes.data), (c_size_t * 1)(8),
            c_size_t(1), byref(cuda.CudaAttributes(1)), byref(c_size_t(0)), c_size_t(count),
            byref(c_size_t()), stream,
        )  # fmt: skip
        assert answered == (code if count == num_attributes else 0)
