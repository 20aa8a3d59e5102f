"""cuFile's batches: many pieces are begun by one call, and their events waited for.

An event says two things, and both have to be good: its status, and what it moved. A batch whose
events have not all come is under way, whatever was answered meanwhile: nothing of it is let go. A
cancel promises nothing either, it only makes events come sooner.
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
from kvtier.tiers.disk.io.placed import Placed

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
"""Bytes of one request. A request that goes through host memory holds a buffer of this size."""
LOOK_S: Final = 0.1
"""One wait for events lasts this long at most."""
PAUSE_S: Final = 0.0005
REFUSED: Final = frozenset({5022, 5037})
"""Answers of ``BatchIOSubmit`` that come before anything is begun: wrong arguments, a full batch.
Any other may come after."""

MODE, READ, WRITE = 1, 0, 1
WAITING, PENDING, CANCELED, COMPLETE = 0x01, 0x02, 0x08, 0x10


class BatchRequest(Structure):
    """CUfileIOParams_t, its union of one laid flat."""

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
    """CUfileIOEvents_t. moved: bytes, or an error below 0, though the header has no sign for it."""

    _fields_ = (("cookie", c_void_p), ("status", c_int), ("moved", c_ssize_t))


class Timespec(Structure):
    """struct timespec."""

    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


def batch_calls(prefix: str, without: str) -> tuple[Call, ...]:
    """The calls of batches. without: what is done where they are missing."""
    events = (c_void_p, c_uint, POINTER(c_uint), POINTER(BatchEvent), POINTER(Timespec))
    submit = (c_void_p, c_uint, POINTER(BatchRequest), c_uint)
    setup = (POINTER(c_void_p), c_uint)
    return (
        Call(f"{prefix}BatchIOSetUp", setup, without=without, returns=FileStatus),
        Call(f"{prefix}BatchIOSubmit", submit, without=without, returns=FileStatus),
        Call(f"{prefix}BatchIOGetStatus", events, without=without, returns=FileStatus),
        Call(f"{prefix}BatchIOCancel", (c_void_p,), without=without, returns=FileStatus),
        Call(f"{prefix}BatchIODestroy", (c_void_p,), without=without, returns=None),
    )


@dataclass(slots=True)
class _Request:
    """A part of a piece: ``size`` bytes from ``done`` on."""

    piece: int
    done: int
    size: int


class BatchQueue:
    """The batches of one direction, one after the other. One thread uses it.

    max_requests: in one batch. on_lost: called when it can't be said for too long whether the
    driver still moves something. Raises ``DriverError``.
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
        self._id = self._set_up()

    def close(self) -> None:
        """Nothing may be under way."""
        if self._id:
            self._library.tell("BatchIODestroy", self._id)
            self._id = 0

    def move(self, batch: Placed, pieces: list[int], grace_s: float) -> None:
        """Move these pieces of ``batch``; their results are there when it returns.

        grace_s: after the deadline, until ``on_lost`` is called. It is waited on then, for as long
        as it takes.
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

    def _set_up(self) -> int:
        made = c_void_p()
        self._library.check("BatchIOSetUp", byref(made), self._max_requests)
        return made.value or 0

    def _submit(self, batch: Placed, some: list[_Request]) -> bool:
        """Begin some requests; False where surely none of them was."""
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
            self._on_lost(f"a batch was answered with {code}, and part of it may be under way")
            self._library.code("BatchIOCancel", self._id)
        return True

    def _collect(self, batch: Placed, left: deque[_Request], grace_s: float) -> None:
        """Until all events have come. What has moved in part goes back to ``left``."""
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
        if is_cancelled:  # nobody says that it can be used again
            self.close()
            self._id = self._set_up_again()

    def _wait(self, seconds: float) -> list[BatchEvent]:
        """Events that came; of what has ended."""
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
            logger.warning("events of a batch can't be had code=%d", code)
            time.sleep(LOOK_S)
            return []
        if not num.value:
            time.sleep(PAUSE_S)  # not every driver waits as long as it was asked to
        some = self._events[: min(num.value, most)]
        return [event for event in some if not event.status & (WAITING | PENDING)]

    def _set_up_again(self) -> int:
        made = c_void_p()
        code = self._library.code("BatchIOSetUp", byref(made), self._max_requests)
        if code:
            self._on_lost(f"there is no batch any more: {code}")
            return 0
        return made.value or 0


def _settle(batch: Placed, request: _Request, event: BatchEvent, left: deque[_Request]) -> None:
    """Put down what became of a request."""
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
    # Only the end of the file cuts a page, and no read may begin there.
    if moved and not moved % IO_ALIGNMENT:
        left.append(_Request(request.piece, request.done + moved, request.size - moved))
    elif batch.ended():
        _fail(batch, request, batch.ended())


def _fail(batch: Placed, request: _Request, code: int) -> None:
    """Record the first failure; lateness only if nothing else failed."""
    before = batch.results[request.piece]
    if before >= 0 or before == -errno.ECANCELED:
        batch.results[request.piece] = code
