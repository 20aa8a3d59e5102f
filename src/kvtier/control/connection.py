"""HTTP/1.1 connection of uvicorn, with the doorman's limits."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from starlette.responses import JSONResponse, Response
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvtier.control.doorman import Doorman

MAX_HEADER_BYTES = 16 << 10
MAX_PIECES = 4096
PIECE_BYTES = 256
"""A body may come in ``MAX_PIECES`` pieces, plus one for each ``PIECE_BYTES`` of it: the cost of a
piece does not depend on its size."""
INVALID_HTTP = "The request is not valid HTTP/1.1; check its request line, headers and body."
HEADER_TOO_LONG = (
    f"The request's header is longer than {MAX_HEADER_BYTES} bytes; shorten its path or its fields."
)

_END = re.compile(rb"\n\r?\n")


class _Parser(h11.Connection):
    """Counts the pieces of a body, and keeps the status of the error that ended the connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.status = 400
        self.num_bytes = 0
        self._num_pieces = 0

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        try:
            if self.their_state is h11.IDLE:
                self._refuse_long_header()
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        except (ValueError, UnicodeError) as error:
            raise h11.RemoteProtocolError("no HTTP") from error
        if isinstance(event, h11.Request):
            self._num_pieces = self.num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self.num_bytes += len(event.data)
            if self._num_pieces > MAX_PIECES + self.num_bytes // PIECE_BYTES:
                raise h11.RemoteProtocolError("too many pieces")
        return event

    def _refuse_long_header(self) -> None:
        """Refuse a long header in one packet; h11's own limit applies only to several packets."""
        received, _ = self.trailing_data
        if len(received) > MAX_HEADER_BYTES and not _END.search(received, 0, MAX_HEADER_BYTES):
            raise h11.RemoteProtocolError("header too long", error_status_hint=431)


class HttpConnection(H11Protocol):
    """Connection class that uvicorn instantiates.

    raw: transport below TLS; None for plain HTTP.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doorman: Doorman,
        raw: asyncio.Transport | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Parser = _Parser()
        self._doorman = doorman
        self._raw = raw
        self._num_unwanted = 0
        self._unwanted = asyncio.Event()

    @property
    def unsent_bytes(self) -> int:
        """Bytes written for the client that it has not read yet."""
        num_encrypted = 0 if self._raw is None else self._raw.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + num_encrypted

    def abort(self) -> None:
        """Close at once, discarding unsent data."""
        self.transport.abort()

    @property
    def num_body_bytes(self) -> int:
        """Bytes received of the current request's body."""
        return self.conn.num_bytes

    async def discard(self, num_bytes: int) -> None:
        """Read and discard the next ``num_bytes`` bytes unparsed.

        The connection cannot be used afterwards: the next answer must close it.
        """
        self._num_unwanted = num_bytes
        self.flow.resume_reading()
        await self._unwanted.wait()

    def data_received(self, data: bytes) -> None:
        if self._num_unwanted <= 0:
            super().data_received(data)
            return
        self._num_unwanted -= len(data)
        if self._num_unwanted <= 0:
            self._unwanted.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._doorman.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._doorman.left(self)
        self._unwanted.set()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self.scope["state"]["connection"] = self
            self._doorman.asks(self)

    def on_response_complete(self) -> None:
        self._doorman.waits(self)  # first: the next request may have arrived already
        super().on_response_complete()
        self._hang_up()

    def shutdown(self) -> None:
        super().shutdown()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close a connection whose output was all sent.

        Under TLS the peer would have to agree, which an idle peer does only when it next uses the
        connection.
        """
        if self._raw is not None and self.transport.is_closing() and not self.unsent_bytes:
            self._raw.abort()

    def refusal(self, status: int) -> Response:
        """Return the answer to invalid HTTP. status: 431 for a long header, else 400."""
        reason = INVALID_HTTP if status == 400 else HEADER_TOO_LONG
        return JSONResponse({"error": reason}, status)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP and close the connection. msg: uvicorn's, which is not used."""
        self._doorman.waits(self)
        self._doorman.note("invalid_http")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # cuts the answer in progress
            self._hang_up()
            return
        response = self.refusal(self.conn.status)
        headers = [*response.raw_headers, (b"connection", b"close")]
        events = (
            h11.Response(status_code=response.status_code, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._hang_up()
