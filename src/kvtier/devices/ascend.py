"""Huawei Ascend: the C interface of CANN's runtime (AscendCL), by ctypes.

The table lists the calls that copies use, their first version, and the replacement if a call is
missing. Sources: acl_rt.h of CANN 8.3 - 9.1, and the behaviour of its runtime (8.5 and 9.2).

    call                          since   missing, or refused with 207000
    aclrtMemcpyBatchAsync         8.3     aclrtMemcpyBatchAsyncV2, then 2-D and single copies. Chips
                                          and drivers without support refuse the first call
    aclrtMemcpyBatchAsyncV2       9.1     the same without failIndex; used if the first is missing
    aclrtMemcpy2dAsync            -       needed: a page of all layers at once, host <-> device
    aclrtMemcpyAsync              -       needed
    aclrtHostRegisterV2           8.5     aclrtHostRegister
    aclrtHostRegister             8.3     pageable memory: copies work, but slowly, one by one
    aclrtCreateStreamWithConfig   -       needed: own streams, because the default one blocks
    aclrtCreateEventExWithFlag    -       needed: events that can be waited for more than once

Traps. The attributes of a batch name the destination first, and in a location the id comes before
the type: CUDA has both in the opposite order. A batch has one direction, to the device or back, and
host memory is HOST with id 0 on any NUMA node. At most 4,096 copies, none of size 0. A failed batch
may have begun: synchronise the stream before the memory is used or the copies are retried. Events
that streams can wait for are scarce, so they are released as early as possible.
"""

from __future__ import annotations

import threading
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import ComputeStream, Handle, torch_compute
from kvtier.devices.copies import Copies, CopyRows
from kvtier.devices.driver import Driver
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.library import Call, DriverError, Library

NAMES = ("libascendcl.so",)
LIBRARY_VARIABLE = "KVTIER_ASCEND_LIBRARY"

_STREAM = _EVENT = c_void_p
_ANSWER = POINTER(c_void_p)
# dsts, destMaxs, srcs, sizes, numBatches, attrs, attrsIndexes, numAttrs [, failIndex], stream
_BATCH = (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)

BATCH, BATCH_V2 = "aclrtMemcpyBatchAsync", "aclrtMemcpyBatchAsyncV2"
CALLS = (
    Call("aclInit", (c_char_p,)),
    Call("aclGetRecentErrMsg", (), without="the code alone is shown", returns=c_char_p),
    Call("aclrtGetSocName", (), without="no name is shown", returns=c_char_p),
    Call("aclrtSetDevice", (c_int,)),
    Call("aclrtCreateStreamWithConfig", (_ANSWER, c_uint32, c_uint32)),
    Call("aclrtDestroyStream", (_STREAM,)),
    Call("aclrtSynchronizeStream", (_STREAM,)),
    Call("aclrtStreamWaitEvent", (_STREAM, _EVENT)),
    Call("aclrtCreateEventExWithFlag", (_ANSWER, c_uint32)),
    Call("aclrtRecordEvent", (_EVENT, _STREAM)),
    Call("aclrtQueryEventStatus", (_EVENT, POINTER(c_int))),
    Call("aclrtSynchronizeEvent", (_EVENT,)),
    Call("aclrtDestroyEvent", (_EVENT,)),
    Call("aclrtMemcpyAsync", (c_void_p, c_size_t, c_void_p, c_size_t, c_int, _STREAM)),
    Call(
        "aclrtMemcpy2dAsync",
        (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, _STREAM),
    ),
    Call(BATCH, (*_BATCH, POINTER(c_size_t), _STREAM), "8.3", "2-D and single copies"),
    Call(BATCH_V2, (*_BATCH, _STREAM), "9.1", BATCH),
    Call("aclrtMalloc", (_ANSWER, c_size_t, c_int)),
    Call("aclrtFree", (c_void_p,)),
    Call("aclrtHostRegister", (c_void_p, c_uint64, c_int, _ANSWER), "8.3", "pageable memory"),
    Call("aclrtHostRegisterV2", (c_void_p, c_uint64, c_uint32), "8.5", "aclrtHostRegister"),
    Call("aclrtHostUnregister", (c_void_p,), "8.3", "pageable memory"),
)

NOT_SUPPORTED, REPEATED_INIT = 207000, 100002
PRIORITY, FAST_LAUNCH, FAST_SYNC = 0, 1, 2
EVENT_SYNC, EVENT_PROGRESS = 1, 2
"""Streams can wait for the event, and the host can query it."""
EVENT_COMPLETE = 1
"""Status of a completed event. A completed stream reports 0."""
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
KIND = {Direction.LOAD: HOST_TO_DEVICE, Direction.STORE: DEVICE_TO_HOST}
AT_HOST, AT_DEVICE = 0, 1
HUGE_PAGES_FIRST = 0
REGISTER_MAPPED, REGISTER_V2_PINNED = 0, 0x10000000


class AscendLocation(Structure):
    """aclrtMemLocation: the id comes first."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class AscendAttributes(Structure):
    """aclrtMemcpyBatchAttr: the destination comes first; the reserved bytes have to be 0."""

    _fields_ = (
        ("dst_location", AscendLocation),
        ("src_location", AscendLocation),
        ("reserved", c_uint8 * 16),
    )


class AscendDriver(Driver):
    """The NPU ``index`` among those in ``ASCEND_RT_VISIBLE_DEVICES``."""

    FREE_STREAM, SYNCHRONIZE = "aclrtDestroyStream", "aclrtSynchronizeStream"
    WAIT, FORGET = "aclrtSynchronizeEvent", "aclrtDestroyEvent"
    FREE, UNLOCK = "aclrtFree", "aclrtHostUnregister"

    def __init__(self, index: int) -> None:
        self.name = f"npu:{index}"
        self._index = index
        self.library = Library(NAMES, LIBRARY_VARIABLE, CALLS, _meaning)
        if (
            code := self.library.function("aclInit")(None)
        ) != REPEATED_INIT:  # torch_npu has initialised it
            self.library.check("aclInit", code)
        self._thread = threading.local()
        self.use()
        host, device = AscendLocation(0, AT_HOST), AscendLocation(index, AT_DEVICE)
        self._attributes = {
            Direction.LOAD: AscendAttributes(device, host),
            Direction.STORE: AscendAttributes(host, device),
        }
        self._all = c_size_t(0)  # one set of attributes, from the first copy on

    def use(self) -> None:
        if not getattr(self._thread, "is_set", False):
            self.library.call("aclrtSetDevice", self._index)
            self._thread.is_set = True

    def describe(self) -> list[Finding]:
        has_name = self.library.has("aclrtGetSocName")
        name = self.library.text("aclrtGetSocName") if has_name else "Ascend NPU"
        newest = "CANN 9.1 or newer" if self.library.has(BATCH_V2) else "CANN before 9.1"
        return [Finding("accelerator", name, newest)]

    # -- streams and events -----------------------------------------------------------------------

    def new_stream(self) -> Handle:
        return self.library.handle("aclrtCreateStreamWithConfig", PRIORITY, FAST_LAUNCH | FAST_SYNC)

    def hold_stream(self, stream: Handle, event: Handle) -> None:
        self.library.call("aclrtStreamWaitEvent", stream, event)

    def record(self, stream: Handle) -> Handle:
        event = self.library.handle("aclrtCreateEventExWithFlag", EVENT_SYNC | EVENT_PROGRESS)
        self.library.call("aclrtRecordEvent", event, stream)
        return event

    def has_passed(self, event: Handle) -> bool:
        status = c_int()
        self.library.call("aclrtQueryEventStatus", event, byref(status))
        return status.value == EVENT_COMPLETE

    # -- copies -----------------------------------------------------------------------------------

    @property
    def why_no_batch(self) -> str:
        if self.library.has(BATCH) or self.library.has(BATCH_V2):
            return ""
        return f"this CANN has no {BATCH}; it came with 8.3 as an experiment, and with 8.5"

    def is_refusal(self, code: int) -> bool:
        return code == NOT_SUPPORTED

    def copy_batch(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        failed, first = c_size_t(), self.library.has(BATCH)
        self.library.call(
            BATCH if first else BATCH_V2,
            copies.dst.ctypes.data,
            copies.size.ctypes.data,  # size of each destination
            copies.src.ctypes.data,
            copies.size.ctypes.data,
            len(copies),
            byref(self._attributes[direction]),
            byref(self._all),
            1,
            *((byref(failed),) if first else ()),
            stream,
        )

    def copy_each(self, copies: Copies, direction: Direction, stream: Handle) -> None:
        copy, kind = self.library.function("aclrtMemcpyAsync"), KIND[direction]
        for dst, src, size in zip(
            copies.dst.tolist(), copies.src.tolist(), copies.size.tolist(), strict=True
        ):
            if code := copy(dst, size, src, size, kind, stream):
                self.library.check("aclrtMemcpyAsync", code)

    def copy_rows(self, rows: CopyRows, direction: Direction, stream: Handle) -> None:
        copy, kind = self.library.function("aclrtMemcpy2dAsync"), KIND[direction]
        for dst, src, dst_pitch, src_pitch, width, height in rows.each():
            if code := copy(dst, dst_pitch, src, src_pitch, width, height, kind, stream):
                self.library.check("aclrtMemcpy2dAsync", code)

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return self.library.handle("aclrtMalloc", nbytes, HUGE_PAGES_FIRST)

    def lock(self, address: int, nbytes: int) -> None:
        if self.library.has("aclrtHostRegisterV2"):
            try:
                self.library.call("aclrtHostRegisterV2", address, nbytes, REGISTER_V2_PINNED)
            except DriverError as error:
                if not self.is_refusal(error.code):
                    raise
            else:
                return
        if not self.library.has("aclrtHostRegister"):
            raise DriverError("aclrtHostRegister", NOT_SUPPORTED, "this CANN does not have it")
        self.library.call("aclrtHostRegister", address, nbytes, REGISTER_MAPPED, byref(c_void_p()))


class AscendDevice(DriverDevice):
    """An Ascend NPU.

    name: "npu" or "npu:1".
    compute_stream: default: torch_npu's.
    """

    file_library = "nds"

    def __init__(self, name: str = "npu", compute_stream: ComputeStream | None = None) -> None:
        driver = AscendDriver(int(name.partition(":")[2] or 0))
        super().__init__(driver, compute_stream or torch_compute(driver.name, "npu_stream"))


def _meaning(acl: Library, code: int) -> str:
    words = acl.text("aclGetRecentErrMsg") if acl.has("aclGetRecentErrMsg") else ""
    return words.strip() or "no message"
