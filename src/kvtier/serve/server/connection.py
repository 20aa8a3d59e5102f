"""HTTP/1.1 connection of the server, with errors in the API's shape."""

from __future__ import annotations

from starlette.responses import Response

from kvtier.control.connection import HEADER_TOO_LONG, INVALID_HTTP, HttpConnection
from kvtier.serve.server.errors import ApiError


class ApiConnection(HttpConnection):
    """Connection class that uvicorn instantiates."""

    def refusal(self, status: int) -> Response:
        if status == 431:
            return ApiError(431, HEADER_TOO_LONG, code="header_too_large").response()
        return ApiError(400, INVALID_HTTP, code="invalid_http").response()
