"""Frames on the socket of an engine's process, in the node's event loop."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvtier.node.wire.protocol import MAX_FIRST_BYTES, SOCKET_BYTES, Frames, Turns

TURN_S = 1e-3
"""A connection handles frames for so long, then the others have a turn."""
MANY_UNSENT_BYTES = 1 << 20
"""While so many bytes of answers wait for a process to read them, nothing is read from it."""


class _Unsent(NamedTuple):
    """A frame, or the rest of one, that was not sent yet. See ``FrameSocket.send``."""

    content: memoryview
    fds: Sequence[int]
    undo: Callable[[], object] | None


class FrameSocket:
    """Receives and sends frames. Owned by the event loop's thread.

    Nothing is received while the process leaves too many answers unread.

    Args:
        connection: the socket; closed at the end.
        take: handle the content of a frame, which is valid during the call. Returns the turns that
            are left for it, or None; the next frame is handled after the last of them.
        on_error: called with an error of ``take``, of one of its turns, or of a stream that can't
            be split into frames; closes the socket, or hangs up.
        on_end: called when the process has closed its end, and all its frames were handled.

    Attributes:
        is_open: whether it was not closed yet.
        is_hung_up: whether nothing is sent any more.
        num_unsent: bytes that wait for the process to read them.
        received_s: monotonic time at which the newest bytes arrived.
    """

    def __init__(
        self,
        connection: socket.socket,
        take: Callable[[memoryview], Turns | None],
        on_error: Callable[[Exception], object],
        on_end: Callable[[], object],
    ) -> None:
        self._socket = connection
        self._take = take
        self._on_error = on_error
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(MAX_FIRST_BYTES)
        self._turn: asyncio.Handle | None = None
        self._turns_left: Turns | None = None  # of the last frame
        self._unsent: deque[_Unsent] = deque()
        self.num_unsent = 0
        self.received_s = 0.0
        self._is_writing = self._is_read = self._is_broken = self.is_hung_up = False
        self._is_unwatched = False  # whether the event loop may not report what arrives
        self.is_open = True
        self._fd = connection.fileno()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._choose_reading()

    def accept_up_to(self, most_bytes: int) -> None:
        """Accept frames of up to ``most_bytes`` from now on."""
        self._frames.most_bytes = most_bytes

    # -- receiving ---------------------------------------------------------------------------------

    def _choose_reading(self) -> None:
        """Read from the socket, unless frames are to be handled or answers wait to be read."""
        may_read = self._is_broken or self.num_unsent < MANY_UNSENT_BYTES
        wanted = self.is_open and self._turn is None and may_read
        if wanted and self._is_unwatched:
            wanted, self._turn = False, self._loop.call_soon(self._receive)
        if wanted and not self._is_read:
            self._loop.add_reader(self._fd, self._receive)
        elif self._is_read and not wanted:
            self._loop.remove_reader(self._fd)
        self._is_read = wanted

    def read_on(self) -> None:
        """Receive what has arrived without waiting for the event loop to report it."""
        self._is_unwatched = True
        self._choose_reading()

    def _receive(self) -> None:
        self._turn = None
        try:
            num = self._socket.recv_into(self._frames.memory())
            if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                # The process has closed its end, and left answers unread. uvloop reports this once.
                self._is_unwatched = True
        except BlockingIOError:
            self._is_unwatched = False
            self._choose_reading()
            return
        except OSError:
            num = 0
        if not num:
            self._on_end()
            return
        self.received_s = time.monotonic()
        self._frames.received(num)
        self._take_turn()

    def _take_turn(self) -> None:
        """Handle frames for a while. Other connections have a turn before it goes on."""
        self._turn = None
        end_s = time.monotonic() + TURN_S
        while self.is_open:
            try:
                if not self._has_next():
                    break
            except Exception as error:
                self._turns_left = None
                self._on_error(error)
            if time.monotonic() >= end_s and self.is_open and self._is_more:
                self._turn = self._loop.call_soon(self._take_turn)
                break
        self._choose_reading()

    @property
    def _is_more(self) -> bool:
        return self._turns_left is not None or self._frames.has_next

    def _has_next(self) -> bool:
        """Take the next turn of the last frame, or handle the next frame. False for none."""
        if self._turns_left is not None:
            if next(self._turns_left, self) is self:
                self._turns_left = None
            return True
        content = self._frames.next()
        if content is None:
            return False
        self._turns_left = self._take(content)
        return True

    @property
    def is_ended(self) -> bool:
        """Whether the process has closed its end. Data that it has sent may not be handled yet."""
        poll = select.poll()
        poll.register(self._fd, select.POLLHUP)
        return bool(poll.poll(0))

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self,
        frame: bytes | bytearray,
        fds: Sequence[int] = (),
        undo: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame, with file descriptors.

        undo: called if the process never reads the whole frame.
        """
        if not self.is_open or self.is_hung_up:
            if undo is not None:
                undo()
            return
        if not (self._unsent or self._is_broken or fds):  # as it usually is
            try:
                num = self._socket.send(frame)
            except OSError:  # it is handled below
                num = 0
            if num == len(frame):
                return
            frame = frame[num:]
        self._unsent.append(_Unsent(memoryview(frame), fds, undo))
        self.num_unsent += len(frame)
        if len(self._unsent) == 1 and not self._is_broken:
            self._send_further()

    def _send_further(self) -> None:
        is_stuck = False
        while self._unsent and not is_stuck:
            first = self._unsent[0]
            try:
                if first.fds:
                    num = socket.send_fds(self._socket, [first.content], list(first.fds))
                else:
                    num = self._socket.send(first.content)
            except BlockingIOError:
                break
            except OSError:  # it reads nothing more; what it has sent before is handled first
                self._is_broken = True
                break
            self.num_unsent -= num
            is_stuck = num < len(first.content)
            if is_stuck:
                self._unsent[0] = _Unsent(first.content[num:], (), first.undo)
            else:
                self._unsent.popleft()
        is_writing = bool(self._unsent) and not self._is_broken
        if is_writing and not self._is_writing:
            self._loop.add_writer(self._fd, self._send_further)
        elif self._is_writing and not is_writing:
            self._loop.remove_writer(self._fd)
        self._is_writing = is_writing
        self._choose_reading()

    def hang_up(self) -> None:
        """Send nothing more. What the process still sends is handled until it closes."""
        if not self.is_open or self.is_hung_up:
            return
        self.is_hung_up = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._undo_unsent()
        self._choose_reading()

    def close(self) -> None:
        """Close the socket, once."""
        if not self.is_open:
            return
        self.is_open = self._is_read = False
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._undo_unsent()
        self._take = self._on_error = self._on_end = _ignore  # they keep their owner, and it this

    def _undo_unsent(self) -> None:
        unsent, self._unsent, self.num_unsent = self._unsent, deque(), 0
        for answer in unsent:
            if answer.undo is not None:
                answer.undo()


def _ignore(*_: object) -> None:
    """Do nothing."""
