"""Reads request bodies with limits on time, rate and memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Receive, Scope

from kvtier.control.connection import HttpConnection
from kvtier.serve.server.errors import ApiError, body_late, body_too_long, crowded
from kvtier.serve.server.pace import Pace
from kvtier.serve.server.scan import Bounds, Scan

SMALL_BYTES = 64 << 10
"""A body up to this size is read at once; a longer one waits for a slot."""

PIECE_BYTES = 64 << 10
NUM_LARGE = 4
"""Slots: large bodies in memory at a time."""
MAX_WAITING = 32
"""Large bodies that may wait for a slot; each holds its first packets."""

READ_S_PER_BYTE = 2e-9
"""Seconds per byte that the server needs to receive a body."""

DISCARDED_BYTES = 64 << 20
DISCARDED_S = 5.0
"""The rest of a refused body is read and discarded within these bounds: a client that is still
sending does not see the answer."""
STRANGERS_BYTES, STRANGERS_S = 64 << 10, 1.0
"""The same bounds for requests that are refused before their body is read."""


@dataclass(slots=True)
class Body:
    """One request's body. A large one occupies a slot until ``release``."""

    content: bytes
    _turn: asyncio.Semaphore | None = None
    is_large: bool = field(init=False)
    is_released: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.is_large = self._turn is not None

    def release(self) -> None:
        """Free the body and its slot. Safe to call twice."""
        self.content = b""
        self.is_released = True
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()


class Bodies:
    """Reads the bodies of one server. Belongs to the event loop's thread.

    timeout_s: limit for a whole body; for a large one the time after it got a slot.
    pace: of large ones.
    """

    def __init__(self, max_bytes: int, timeout_s: float, bounds: Bounds, pace: Pace) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._bounds = bounds
        self._turns = asyncio.Semaphore(NUM_LARGE)
        self._num_waiting = 0
        self._pace = pace

    async def read(self, scope: Scope, receive: Receive) -> Body | None:
        """Return the whole body; None if the client has disconnected.

        Raises ``ApiError`` for a body that is too long, too slow or has too many parts, and if too
        many large ones are waiting.
        """
        turn: asyncio.Semaphore | None = None
        scan, parts, num_bytes, more = Scan(self._bounds), list[bytes](), 0, True
        try:
            if _declared_bytes(scope) > self._max_bytes:
                raise body_too_long(self._max_bytes)
            async with asyncio.timeout(self._timeout_s) as timer:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        _give_back(turn)
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    num_bytes += len(part)
                    if num_bytes > self._max_bytes:
                        raise body_too_long(self._max_bytes)
                    # Scan first: a body that is refused at once needs no slot.
                    await self._scan(scan, part, num_bytes)
                    parts.append(part)
                    if turn is None and num_bytes > SMALL_BYTES:
                        timer.reschedule(None)
                        turn = await self._take_turn()
                        timer.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        except TimeoutError:
            _give_back(turn)
            raise body_late(self._timeout_s) from None
        except ApiError as error:
            _give_back(turn)
            if more:
                await self._discard(scope, receive, error, DISCARDED_BYTES, DISCARDED_S)
            raise
        except BaseException:
            _give_back(turn)
            raise
        return Body(b"".join(parts), turn)

    async def refuse(self, scope: Scope, receive: Receive, error: ApiError) -> None:
        """Discard the body of a request that is answered with ``error`` without reading it."""
        await self._discard(scope, receive, error, STRANGERS_BYTES, STRANGERS_S)

    async def _take_turn(self) -> asyncio.Semaphore:
        if self._num_waiting >= MAX_WAITING:
            raise crowded("Too many long requests are being read")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise crowded("Too many long requests are being read") from None
        finally:
            self._num_waiting -= 1
        return self._turns

    async def _scan(self, scan: Scan, part: bytes, num_bytes: int) -> None:
        """Scan a piece of a body. Beyond ``SMALL_BYTES`` it keeps to the pace of large bodies.

        num_bytes: received so far, including this piece.
        """
        for at in range(0, len(part), PIECE_BYTES):
            end = num_bytes - len(part) + min(at + PIECE_BYTES, len(part))
            if end <= SMALL_BYTES:
                scan.add(part[at : at + PIECE_BYTES])
                continue
            await asyncio.sleep(self._pace.wait_s)
            piece = part[at : at + PIECE_BYTES]
            began = time.perf_counter()
            try:
                scan.add(piece)
            finally:
                spent_s = time.perf_counter() - began
                self._pace.worked(spent_s + len(piece) * READ_S_PER_BYTE)

    async def _discard(
        self, scope: Scope, receive: Receive, error: ApiError, max_bytes: int, max_s: float
    ) -> None:
        """Read and discard the rest of a body.

        If it exceeds the bounds, ``error`` also ends the connection.
        """
        closes_anyhow = "Connection" in error.headers
        error.headers["Connection"] = "close"
        connection: HttpConnection = scope["state"]["connection"]
        rest = _declared_bytes(scope) - connection.num_body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(max_s):
                if rest > SMALL_BYTES:
                    await connection.discard(min(rest, max_bytes))
                elif await _is_short(receive) and not closes_anyhow:
                    del error.headers["Connection"]


async def _is_short(receive: Receive) -> bool:
    """Read on. Return whether the body ends soon."""
    num_bytes, more = 0, True
    while more and num_bytes < SMALL_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    return not more


def _give_back(turn: asyncio.Semaphore | None) -> None:
    if turn is not None:
        turn.release()


def _declared_bytes(scope: Scope) -> int:
    """Return the body's declared length, which h11 has validated."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
