"""AMD: the HIP runtime, by ctypes.

ROCm 7.1 introduced ``hipMemcpyBatchAsync`` in the form of CUDA 12.8. Before HIP 7.13 it refuses
attributes (801), since then it requires them. More than 8,192 copies in a call have faulted, and
batches have overtaken graphs that were replayed: ``KVTIER_BATCH_COPY=off`` disables the call.
Source: HIP runtime API, 6.0 to 7.13.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cached_property

from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import ComputeStream, Handle, torch_compute
from kvtier.devices.copies import Copies, CopyRows
from kvtier.devices.cuda import ORDER_ANY, ORDER_STREAM, CudaAttributes
from kvtier.devices.driver import Driver, pci_numa_node
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.library import Call, DriverError, Library

NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
LIBRARY_VARIABLE = "KVTIER_HIP_LIBRARY"

_STREAM = _EVENT = c_void_p
_ANSWER = POINTER(c_void_p)
BATCH = Call(
    "hipMemcpyBatchAsync",
    # dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream
    (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
    since="ROCm 7.1",
    without="2-D and single copies",
)
CALLS = (
    Call("hipInit", (c_uint,)),
    Call("hipRuntimeGetVersion", (POINTER(c_int),)),
    Call("hipGetErrorName", (c_int,), returns=c_char_p),
    Call("hipGetLastError", ()),
    Call("hipGetDeviceCount", (POINTER(c_int),)),
    Call("hipSetDevice", (c_int,)),
    Call("hipDeviceGetName", (c_char_p, c_int, c_int)),
    Call("hipDeviceGetPCIBusId", (c_char_p, c_int, c_int)),
    Call("hipStreamCreateWithFlags", (_ANSWER, c_uint)),
    Call("hipStreamDestroy", (_STREAM,)),
    Call("hipStreamSynchronize", (_STREAM,)),
    Call("hipStreamWaitEvent", (_STREAM, _EVENT, c_uint)),
    Call("hipEventCreateWithFlags", (_ANSWER, c_uint)),
    Call("hipEventRecord", (_EVENT, _STREAM)),
    Call("hipEventQuery", (_EVENT,)),
    Call("hipEventSynchronize", (_EVENT,)),
    Call("hipEventDestroy", (_EVENT,)),
    Call("hipMemcpyAsync", (c_void_p, c_void_p, c_size_t, c_int, _STREAM)),
    Call(
        "hipMemcpy2DAsync",
        (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, _STREAM),
    ),
    BATCH,
    Call("hipMalloc", (_ANSWER, c_size_t)),
    Call("hipFree", (c_void_p,)),
    Call("hipHostRegister", (c_void_p, c_size_t, c_uint)),
    Call("hipHostUnregister", (c_void_p,)),
)

STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING = 1, 2
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
NO_DEVICE, NOT_READY, NOT_SUPPORTED = 100, 600, 801
KIND = {Direction.LOAD: 1, Direction.STORE: 2}
"""Kinds of copies: host to device, device to host."""
TAKES_ATTRIBUTES = 7 * 10**7 + 13 * 10**5
"""HIP 7.13 in the format of ``hipRuntimeGetVersion``: major, minor, patch."""


class HipDriver(Driver):
    """The GPU ``index`` among those in ``HIP_VISIBLE_DEVICES``. torch calls it cuda, too."""

    FREE_STREAM, SYNCHRONIZE = "hipStreamDestroy", "hipStreamSynchronize"
    WAIT, FORGET = "hipEventSynchronize", "hipEventDestroy"
    FREE, UNLOCK = "hipFree", "hipHostUnregister"

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self.library = Library(NAMES, LIBRARY_VARIABLE, CALLS, _meaning)
        self.library.call("hipInit", 0)
        if index >= (count := self.library.number("hipGetDeviceCount")):
            raise DriverError("hipGetDeviceCount", NO_DEVICE, f"{count} devices, none is {index}")
        self._version = self.library.number("hipRuntimeGetVersion")
        self._orders = {
            Direction.LOAD: CudaAttributes(ORDER_ANY),
            Direction.STORE: CudaAttributes(ORDER_STREAM),
        }
        self._all = c_size_t(0)  # one set of attributes, from the first copy on

    def use(self) -> None:
        self.library.call("hipSetDevice", self._index)

    def describe(self) -> list[Finding]:
        name = ctypes.create_string_buffer(256)
        self.library.call("hipDeviceGetName", name, len(name), self._index)
        major, minor = self._version // 10**7, self._version % 10**7 // 10**5
        return [Finding("accelerator", name.value.decode(), f"HIP {major}.{minor}")]

    @cached_property
    def numa_node(self) -> int | None:
        bus_id = ctypes.create_string_buffer(32)
        self.library.call("hipDeviceGetPCIBusId", bus_id, len(bus_id), self._index)
        return pci_numa_node(bus_id.value.decode())

    # -- streams and events -----------------------------------------------------------------------

    def new_stream(self) -> Handle:
        return self.library.handle("hipStreamCreateWithFlags", STREAM_NON_BLOCKING)

    def hold_stream(self, stream: Handle, event: Handle) -> None:
        self.library.call("hipStreamWaitEvent", stream, event, 0)

    def record(self, stream: Handle) -> Handle:
        flags = EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING
        event = self.library.handle("hipEventCreateWithFlags", flags)
        self.library.call("hipEventRecord", event, stream)
        return event

    def has_passed(self, event: Handle) -> bool:
        code = self.library.function("hipEventQuery")(event)
        if code != NOT_READY:
            self.library.check("hipEventQuery", code)
        return code == 0

    # -- copies -----------------------------------------------------------------------------------

    @property
    def why_no_batch(self) -> str:
        if self.library.has(BATCH.name):
            return ""
        return f"this HIP has no {BATCH.name}; it came with {BATCH.since}"

    def is_refusal(self, code: int) -> bool:
        return code == NOT_SUPPORTED

    def copy_batch(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        failed, takes = c_size_t(), self._version >= TAKES_ATTRIBUTES
        self.library.call(
            BATCH.name,
            copies.dst.ctypes.data,
            copies.src.ctypes.data,
            copies.size.ctypes.data,
            len(copies),
            byref(self._orders[direction]) if takes else None,
            byref(self._all) if takes else None,
            int(takes),
            byref(failed),
            stream,
        )

    def copy_each(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        copy, kind = self.library.function("hipMemcpyAsync"), KIND[direction]
        for dst, src, size in zip(
            copies.dst.tolist(), copies.src.tolist(), copies.size.tolist(), strict=True
        ):
            if code := copy(dst, src, size, kind, stream):
                self.library.check("hipMemcpyAsync", code)

    def copy_rows(self, rows: CopyRows, direction: Direction, stream: Handle) -> None:
        copy, kind = self.library.function("hipMemcpy2DAsync"), KIND[direction]
        for dst, src, dst_pitch, src_pitch, width, height in rows.each():
            if code := copy(dst, dst_pitch, src, src_pitch, width, height, kind, stream):
                self.library.check("hipMemcpy2DAsync", code)

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return self.library.handle("hipMalloc", nbytes)

    def lock(self, address: int, nbytes: int) -> None:
        try:
            flags = REGISTER_PORTABLE | REGISTER_MAPPED
            self.library.call("hipHostRegister", address, nbytes, flags)
        except DriverError:
            self.library.function("hipGetLastError")()  # clear it, or torch would report it later
            raise


class HipDevice(DriverDevice):
    """An AMD GPU.

    name: "cuda" or "cuda:1", as in torch.
    compute_stream: default: torch's.
    """

    file_library = "hipfile"

    def __init__(self, name: str = "cuda", compute_stream: ComputeStream | None = None) -> None:
        driver = HipDriver(int(name.partition(":")[2] or 0))
        super().__init__(driver, compute_stream or torch_compute(driver.name, "cuda_stream"))


def _meaning(hip: Library, code: int) -> str:
    return hip.text("hipGetErrorName", code)
