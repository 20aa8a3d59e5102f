"""NVIDIA: the CUDA driver API, by ctypes.

The runtime API is not used: ``cudaMemcpyBatchAsync`` changed its arguments in CUDA 13 under the
same name, while ``cuGetProcAddress("cuMemcpyBatchAsync", 12080)`` returns the same form on every
driver that has it. Source: CUDA Driver API, 12.2 to 13.5.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cached_property

from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import ComputeStream, Handle, torch_compute
from kvtier.devices.copies import Copies, CopyRows
from kvtier.devices.driver import Driver, pci_numa_node
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.kernel import CopyKernel
from kvtier.devices.library import Call, DriverError, Library

logger = logging.getLogger(__name__)

NAMES = ("libcuda.so.1", "libcuda.so")
LIBRARY_VARIABLE = "KVTIER_CUDA_LIBRARY"

BATCH = Call(
    "cuMemcpyBatchAsync",
    # dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream
    (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
    since="12.8",
    without="2-D and single copies",
)
BATCH_VERSION = 12080
"""Version of the form with ``failIdx``; every newer driver provides it on request."""

_POINTER, _ANSWER = c_void_p, POINTER(c_void_p)
CALLS = (
    Call("cuInit", (c_uint,)),
    Call("cuDriverGetVersion", (POINTER(c_int),)),
    Call("cuGetErrorName", (c_int, POINTER(c_char_p))),
    Call("cuDeviceGet", (POINTER(c_int), c_int)),
    Call("cuDeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    Call("cuDeviceGetName", (c_char_p, c_int, c_int)),
    Call("cuDeviceGetPCIBusId", (c_char_p, c_int, c_int)),
    Call("cuDevicePrimaryCtxRetain", (_ANSWER, c_int)),
    Call("cuCtxSetCurrent", (_POINTER,)),
    Call("cuStreamCreate", (_ANSWER, c_uint)),
    Call("cuStreamDestroy_v2", (_POINTER,)),
    Call("cuStreamSynchronize", (_POINTER,)),
    Call("cuStreamWaitEvent", (_POINTER, _POINTER, c_uint)),
    Call("cuEventCreate", (_ANSWER, c_uint)),
    Call("cuEventRecord", (_POINTER, _POINTER)),
    Call("cuEventQuery", (_POINTER,)),
    Call("cuEventSynchronize", (_POINTER,)),
    Call("cuEventDestroy_v2", (_POINTER,)),
    Call("cuMemcpyHtoDAsync_v2", (c_uint64, c_void_p, c_size_t, _POINTER)),
    Call("cuMemcpyDtoHAsync_v2", (c_void_p, c_uint64, c_size_t, _POINTER)),
    Call("cuMemcpy2DAsync_v2", (c_void_p, _POINTER)),
    Call("cuMemAlloc_v2", (POINTER(c_uint64), c_size_t)),
    Call("cuMemFree_v2", (c_uint64,)),
    Call("cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint)),
    Call("cuMemHostUnregister", (c_void_p,)),
    Call("cuModuleLoadData", (_ANSWER, c_char_p)),
    Call("cuModuleGetFunction", (_ANSWER, _POINTER, c_char_p)),
    # kernel, blocks in x, y, z, threads in x, y, z, shared memory, stream, arguments, extra
    Call(
        "cuLaunchKernel",
        (_POINTER, *(c_uint,) * 7, _POINTER, _POINTER, _POINTER),
    ),
    Call(
        "cuGetProcAddress_v2",
        (c_char_p, _ANSWER, c_int, c_uint64, c_void_p),
        since="12.0",
        without="no batch call is looked for",
    ),
)

STREAM_NON_BLOCKING = 1
"""The stream does not synchronise with the legacy default stream."""
EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING = 1, 2
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
USE_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
NOT_READY, NOT_SUPPORTED = 600, 801
MEMORY_HOST, MEMORY_DEVICE = 1, 2
ORDER_STREAM, ORDER_ANY = 1, 3
"""When a batch reads its sources: in stream order, or at any time. Loads may use the latter,
because host slots are complete; the source of a store was computed just before."""


class CudaLocation(Structure):
    """CUmemLocation: the type comes first."""

    _fields_ = (("type", c_int), ("id", c_int))


class CudaAttributes(Structure):
    """CUmemcpyAttributes: the source comes first."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_location", CudaLocation),
        ("dst_location", CudaLocation),
        ("flags", c_uint),
    )


class Copy2D(Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_int),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_int),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class CudaDriver(Driver):
    """The GPU ``index`` among those in ``CUDA_VISIBLE_DEVICES``."""

    FREE_STREAM, SYNCHRONIZE = "cuStreamDestroy_v2", "cuStreamSynchronize"
    WAIT, FORGET = "cuEventSynchronize", "cuEventDestroy_v2"
    FREE, UNLOCK = "cuMemFree_v2", "cuMemHostUnregister"

    max_copies = 64
    """A batch starts when all its copies are submitted, about 1 us each: with few, the copy engine
    works while the next ones are submitted, and other threads' calls wait less for the driver."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.library = Library(NAMES, LIBRARY_VARIABLE, CALLS, _meaning)
        self.library.call("cuInit", 0)
        self._device = self.library.number("cuDeviceGet", index)
        self._context = self.library.handle(
            "cuDevicePrimaryCtxRetain", self._device
        )  # shared with torch
        self._why_no_batch = self._find_batch()
        self._orders = {
            Direction.LOAD: CudaAttributes(ORDER_ANY),
            Direction.STORE: CudaAttributes(ORDER_STREAM),
        }
        self._all = c_size_t(0)  # one set of attributes, from the first copy on

    def _find_batch(self) -> str:
        """Bind the batch call. Return why it is missing, "" if it is not."""
        version = self._version
        if self.library.has("cuGetProcAddress_v2"):
            found, status = c_void_p(), c_int()
            code = self.library.function("cuGetProcAddress_v2")(
                BATCH.name.encode(), byref(found), BATCH_VERSION, 0, byref(status)
            )
            if code == 0 and found.value:
                kind = ctypes.CFUNCTYPE(BATCH.returns, *BATCH.arguments)
                self.library.bind(BATCH, kind(found.value))
                return ""
        return f"the driver is for CUDA {version}, and {BATCH.name} came with {BATCH.since}"

    @cached_property
    def _version(self) -> str:
        number = self.library.number("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def use(self) -> None:
        self.library.call("cuCtxSetCurrent", self._context)

    def describe(self) -> list[Finding]:
        name = ctypes.create_string_buffer(256)
        self.library.call("cuDeviceGetName", name, len(name), self._device)
        return [Finding("accelerator", name.value.decode(), f"CUDA {self._version}")]

    @cached_property
    def numa_node(self) -> int | None:
        bus_id = ctypes.create_string_buffer(32)
        self.library.call("cuDeviceGetPCIBusId", bus_id, len(bus_id), self._device)
        return pci_numa_node(bus_id.value.decode())

    @property
    def sees_host_addresses(self) -> bool:
        """Whether kernels access page-locked memory at the host's address."""
        return bool(self.library.number("cuDeviceGetAttribute", USE_HOST_POINTER, self._device))

    # -- streams and events -----------------------------------------------------------------------

    def new_stream(self) -> Handle:
        return self.library.handle("cuStreamCreate", STREAM_NON_BLOCKING)

    def hold_stream(self, stream: Handle, event: Handle) -> None:
        self.library.call("cuStreamWaitEvent", stream, event, 0)

    def record(self, stream: Handle) -> Handle:
        event = self.library.handle("cuEventCreate", EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)
        self.library.call("cuEventRecord", event, stream)
        return event

    def has_passed(self, event: Handle) -> bool:
        code = self.library.function("cuEventQuery")(event)
        if code != NOT_READY:
            self.library.check("cuEventQuery", code)
        return code == 0

    # -- copies -----------------------------------------------------------------------------------

    @property
    def why_no_batch(self) -> str:
        return self._why_no_batch

    def is_refusal(self, code: int) -> bool:
        return code == NOT_SUPPORTED

    def copy_batch(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        failed = c_size_t()
        self.library.call(
            BATCH.name,
            copies.dst.ctypes.data,
            copies.src.ctypes.data,
            copies.size.ctypes.data,
            len(copies),
            byref(self._orders[direction]),
            byref(self._all),
            1,
            byref(failed),
            stream,
        )

    def copy_each(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        name = "cuMemcpyHtoDAsync_v2" if direction is Direction.LOAD else "cuMemcpyDtoHAsync_v2"
        copy = self.library.function(name)
        for dst, src, size in zip(
            copies.dst.tolist(), copies.src.tolist(), copies.size.tolist(), strict=True
        ):
            if code := copy(dst, src, size, stream):
                self.library.check(name, code)

    def copy_rows(self, rows: CopyRows, direction: Direction, stream: Handle) -> None:
        copy, load = self.library.function("cuMemcpy2DAsync_v2"), direction is Direction.LOAD
        area = Copy2D(
            src_type=MEMORY_HOST if load else MEMORY_DEVICE,
            dst_type=MEMORY_DEVICE if load else MEMORY_HOST,
        )
        for dst, src, area.dst_pitch, area.src_pitch, area.width, area.height in rows.each():
            if load:
                area.src_host, area.dst_device = src, dst
            else:
                area.src_device, area.dst_host = src, dst
            if code := copy(byref(area), stream):
                self.library.check("cuMemcpy2DAsync_v2", code)

    def load_kernel(self, image: bytes, name: str) -> Handle:
        """Load a program in PTX. Return its kernel ``name``."""
        module = self.library.handle("cuModuleLoadData", image)
        return self.library.handle("cuModuleGetFunction", module, name.encode())

    def launch(
        self, kernel: Handle, num_blocks: int, num_threads: int, stream: Handle, arguments: object
    ) -> None:
        """Queue a kernel on ``stream``. arguments: array of pointers to the kernel's arguments."""
        self.library.call(
            *("cuLaunchKernel", kernel, num_blocks, 1, 1, num_threads, 1, 1, 0),
            *(stream, arguments, None),
        )

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        address = c_uint64()
        self.library.call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def lock(self, address: int, nbytes: int) -> None:
        self.library.call(
            "cuMemHostRegister_v2", address, nbytes, REGISTER_PORTABLE | REGISTER_MAPPED
        )


class CudaDevice(DriverDevice):
    """An NVIDIA GPU.

    name: "cuda" or "cuda:1".
    compute_stream: default: torch's.
    """

    file_library = "cufile"

    def __init__(self, name: str = "cuda", compute_stream: ComputeStream | None = None) -> None:
        driver = CudaDriver(int(name.partition(":")[2] or 0))
        if compute_stream is None:
            compute_stream = torch_compute(driver.name, "cuda_stream")
        super().__init__(driver, compute_stream, _kernel(driver))


def _kernel(driver: CudaDriver) -> CopyKernel | None:
    """Return the kernel for small copies; None if this GPU cannot run it."""
    if not driver.sees_host_addresses:
        return None
    driver.use()
    try:
        return CopyKernel(driver)
    except DriverError as error:
        logger.info("%s copies without a kernel: %s", driver.name, error)
        return None


def _meaning(cuda: Library, code: int) -> str:
    text = c_char_p()
    cuda.function("cuGetErrorName")(code, byref(text))
    return (text.value or b"unknown").decode(errors="replace")
