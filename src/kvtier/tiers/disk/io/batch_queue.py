"""Batch I/O of cuFile: one call submits many requests, then their events are collected.

A request has succeeded only if both the status of its event and its byte count are good. A batch is
in flight until all of its events have arrived, whatever other calls returned, so its memory must
not be released before. A cancel gives no guarantee; it only makes events arrive sooner.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int, c_long, c_size_t, c_ssize_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Final

from kvtier.devices.library import Call
from kvtier.tiers.disk.io.base import IO_ALIGNMENT
from kvtier.tiers.disk.io.file_library import FileLibrary, FileStatus, outcome
from kvtier.tiers.disk.io.registered import RegisteredBatch

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
"""Maximum bytes of a request. One that goes through host memory holds a buffer of this size."""
LOOK_S: Final = 0.1
"""Maximum duration of one wait for events."""
PAUSE_S: Final = 0.0005
REFUSED: Final = frozenset({5022, 5037})
"""Errors of ``BatchIOSubmit`` after which no request is in flight: wrong arguments, a full batch.
After any other error, some requests may be."""

MODE, READ, WRITE = 1, 0, 1
WAITING, PENDING, CANCELED, COMPLETE = 0x01, 0x02, 0x08, 0x10


class BatchRequest(Structure):
    """CUfileIOParams_t, with its union of one member flattened."""

    _fields_ = (
        ("mode", c_int),
        ("base", c_void_p),
        ("file_offset", c_long),
        ("base_offset", c_long),
        ("size", c_size_t),
        ("handle", c_void_p),
        ("opcode", c_int),
        ("cookie", c_void_p),
    )


class BatchEvent(Structure):
    """CUfileIOEvents_t. moved: bytes, or a negative error, although the header has it unsigned."""

    _fields_ = (("cookie", c_void_p), ("status", c_int), ("moved", c_ssize_t))


class Timespec(Structure):
    """struct timespec."""

    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


_EVENTS = (c_void_p, c_uint, POINTER(c_uint), POINTER(BatchEvent), POINTER(Timespec))
_SUBMIT = (c_void_p, c_uint, POINTER(BatchRequest), c_uint)
_WITHOUT = "one call per piece"
BATCH_CALLS = (
    Call("cuFileBatchIOSetUp", (POINTER(c_void_p), c_uint), without=_WITHOUT, returns=FileStatus),
    Call("cuFileBatchIOSubmit", _SUBMIT, without=_WITHOUT, returns=FileStatus),
    Call("cuFileBatchIOGetStatus", _EVENTS, without=_WITHOUT, returns=FileStatus),
    Call("cuFileBatchIOCancel", (c_void_p,), without=_WITHOUT, returns=FileStatus),
    Call("cuFileBatchIODestroy", (c_void_p,), without=_WITHOUT, returns=None),
)


@dataclass(slots=True)
class _Request:
    """A request for a part of a piece: ``size`` bytes from byte ``done`` on."""

    piece: int
    done: int
    size: int


class BatchQueue:
    """Runs the batches of one direction, one after the other. One thread uses it.

    Args:
        library: the file library.
        handle: handle of the file.
        max_requests: maximum requests in a batch.
        on_lost: called when it is unknown for too long whether the driver still moves bytes.

    Raises:
        DriverError: the batch cannot be set up.
    """

    def __init__(
        self, library: FileLibrary, handle: int, max_requests: int, on_lost: Callable[[str], None]
    ) -> None:
        self._library = library
        self._handle = handle
        self._max_requests = max_requests
        self._on_lost = on_lost
        self._requests = (BatchRequest * max_requests)()
        self._events = (BatchEvent * max_requests)()
        self._under_way: dict[int, _Request] = {}
        self._last_cookie = 0
        made = c_void_p()
        self._library.check("BatchIOSetUp", byref(made), self._max_requests)
        self._id = made.value or 0

    def close(self) -> None:
        """Destroy the batch. Nothing may be in flight."""
        if self._id:
            self._library.tell("BatchIODestroy", self._id)
            self._id = 0

    def move(self, batch: RegisteredBatch, pieces: list[int], grace_s: float) -> None:
        """Move pieces of ``batch``, and set their results.

        Args:
            batch: the transfer.
            pieces: indices of the pieces to move.
            grace_s: seconds after the deadline until ``on_lost`` is called. The call still returns
                only when nothing is in flight, however long that takes.
        """
        left = deque(
            _Request(piece, at, min(PIECE_BYTES, batch.sizes[piece] - at))
            for piece in pieces
            for at in range(0, batch.sizes[piece], PIECE_BYTES)
        )
        batch.results[pieces] = 0
        while left:
            if batch.is_late or not self._id:
                code = -errno.ECANCELED if self._id else -errno.EIO
                for request in left:
                    _fail(batch, request, code)
                return
            some = [left.popleft() for _ in range(min(self._max_requests, len(left)))]
            if self._submit(batch, some):
                self._collect(batch, left, grace_s)

    # -- one batch --------------------------------------------------------------------------------

    def _submit(self, batch: RegisteredBatch, some: list[_Request]) -> bool:
        """Submit requests. Return False if certainly none of them is in flight."""
        for request, slot in zip(some, self._requests, strict=False):
            self._last_cookie += 1
            self._under_way[self._last_cookie] = request
            slot.mode, slot.handle, slot.cookie = MODE, self._handle, self._last_cookie
            slot.opcode = WRITE if batch.write else READ
            slot.base = batch.bases[request.piece]
            slot.base_offset = batch.addresses[request.piece] - slot.base + request.done
            slot.file_offset = batch.offsets[request.piece] + request.done
            slot.size = request.size
        code = self._library.code("BatchIOSubmit", self._id, len(some), self._requests, 0)
        if code in REFUSED:
            self._under_way.clear()
            for request in some:
                _fail(batch, request, outcome(-code, request.size))
            return False
        if code:
            self._on_lost(f"submitting a batch failed with {code}, and part of it may be in flight")
            self._library.code("BatchIOCancel", self._id)
        return True

    def _collect(self, batch: RegisteredBatch, left: deque[_Request], grace_s: float) -> None:
        """Wait until all events have arrived. Put the rest of partial requests into ``left``."""
        is_cancelled = is_lost = False
        while self._under_way:
            now = time.monotonic()
            if batch.ends_at is not None and now >= batch.ends_at and not is_cancelled:
                is_cancelled = True
                code = self._library.code("BatchIOCancel", self._id)
                logger.info("batch cancelled requests=%d code=%d", len(self._under_way), code)
            if batch.ends_at is not None and now >= batch.ends_at + grace_s and not is_lost:
                is_lost = True
                self._on_lost(f"{len(self._under_way)} requests can't be cancelled")
            wait_s = LOOK_S
            if batch.ends_at is not None and not is_cancelled:
                wait_s = min(wait_s, max(0.0, batch.ends_at - now))
            for event in self._wait(wait_s):
                request = self._under_way.pop(event.cookie or 0, None)
                if request is not None:
                    _settle(batch, request, event, left)
        if is_cancelled:  # it is undocumented whether a cancelled batch can be reused
            self.close()
            made = c_void_p()
            if code := self._library.code("BatchIOSetUp", byref(made), self._max_requests):
                self._on_lost(f"no new batch can be set up: {code}")
            self._id = 0 if code else made.value or 0

    def _wait(self, seconds: float) -> list[BatchEvent]:
        """Return the events of requests that have ended."""
        num, most = c_uint(len(self._under_way)), len(self._under_way)
        code = self._library.code(
            "BatchIOGetStatus",
            self._id,
            most,
            byref(num),
            self._events,
            byref(Timespec.of(seconds)),
        )
        if code:
            logger.warning("events of a batch can't be read code=%d", code)
            time.sleep(LOOK_S)
            return []
        if not num.value:
            time.sleep(PAUSE_S)  # some drivers return before the timeout
        some = self._events[: min(num.value, most)]
        return [event for event in some if not event.status & (WAITING | PENDING)]


def _settle(
    batch: RegisteredBatch, request: _Request, event: BatchEvent, left: deque[_Request]
) -> None:
    """Record the outcome of a request."""
    if event.status == CANCELED:
        _fail(batch, request, -errno.ECANCELED)
        return
    moved = outcome(event.moved, request.size)
    if event.status != COMPLETE or moved < 0:
        _fail(batch, request, min(moved, 0) or -errno.EIO)
        return
    if batch.results[request.piece] >= 0:
        batch.results[request.piece] += moved
    if moved == request.size:
        return
    # A partial page means the end of the file; no read may begin there.
    if moved and not moved % IO_ALIGNMENT:
        left.append(_Request(request.piece, request.done + moved, request.size - moved))
    elif batch.ended():
        _fail(batch, request, batch.ended())


def _fail(batch: RegisteredBatch, request: _Request, code: int) -> None:
    """Record the first failure of a piece; another error replaces a cancellation."""
    before = batch.results[request.piece]
    if before >= 0 or before == -errno.ECANCELED:
        batch.results[request.piece] = code
