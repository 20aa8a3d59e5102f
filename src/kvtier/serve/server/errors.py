"""Errors of the API: one clear sentence in the OpenAI error format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

RETRY_AFTER_S = 1
"""Value of ``Retry-After`` if the queue is full: about one short request."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_SHOWN_CHARACTERS = 60


class ApiError(Exception):
    """A request that is answered with an error.

    status: HTTP status.
    message: one sentence.
    param: the field at fault.
    code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        # In ASCII: a field's name may contain surrogates, which UTF-8 cannot encode.
        content = json.dumps(self.body)
        return Response(content, self.status, self.headers, media_type="application/json")


class ClientGone(Exception):  # noqa: N818 - an event, not a failure
    """The client closed the connection before it had its answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def wrong_key(sent: bool, kind: str = "API") -> ApiError:
    found = f"The {kind} key is wrong" if sent else f"The {kind} key is missing"
    return ApiError(
        401,
        f'{found}; send the server\'s key in the header "Authorization: Bearer <key>".',
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def body_too_long(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is longer than {limit_bytes} bytes, the limit of this server; "
        "shorten the prompt or raise --max-body-bytes.",
        code="request_too_large",
        headers={"Connection": "close"},  # otherwise the rest of the body would be read
    )


def body_compressed(encoding: str) -> ApiError:
    return ApiError(
        415,
        f"The body is compressed (Content-Encoding: {show(encoding)}), and this server unpacks "
        "none; send it as it is.",
        code="unsupported_encoding",
    )


def body_late(limit_s: float) -> ApiError:
    return ApiError(
        408,
        f"The request body did not arrive within {limit_s:g} s; send it faster or raise "
        "--body-timeout-s.",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def crowded(what: str) -> ApiError:
    """Return the error for an exceeded limit. what: a clause that names it."""
    return ApiError(
        503,
        f"{what}; try again later.",
        code="overloaded",
        headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )


def busy(reason: str) -> ApiError:
    return ApiError(
        429,
        f"The server is busy: {reason}.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down; send the request again when it is back.",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def internal_error(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"The server failed while it worked on this request ({request_id}); its log says where.",
        code="internal_error",
    )


def show(value: object) -> str:
    """Return a value from a request, shortened and escaped for a message."""
    text = ""
    try:
        # Piece by piece: the value may be long, and only its beginning is shown.
        short = value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value
        for piece in json.JSONEncoder().iterencode(short):
            text += piece
            if len(text) > _SHOWN_CHARACTERS:
                break
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def from_validation(errors: Sequence[Mapping[str, object]]) -> ApiError:
    """Return one sentence about the first of pydantic's findings."""
    first = errors[0]
    kind, message, found = str(first["type"]), str(first["msg"]), first.get("input")
    location = first["loc"]
    assert isinstance(location, tuple)
    if kind == "string_unicode":
        return bad_request("A key in the body is no text; send whole characters.")
    name = _field_name(location)
    if kind == "missing":
        return bad_request(f"{name} is missing; this request needs it.", name, "missing")
    if kind == "value_error":
        return bad_request(f"{message.removeprefix('Value error, ')}.", name, "invalid_value")
    advice = re.sub(
        r"^\w+ should ", "", message
    )  # "Input should be less than 3", "List should ..."
    return bad_request(f"{name} is {show(found)}, but must {advice}.", name, "invalid_value")


def _field_name(location: Sequence[object]) -> str:
    """Return ``messages[0].content`` for ("messages", 0, "content")."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else str(part)
    return name


def add_error_handlers(app: FastAPI) -> None:
    """Give every error that leaves ``app`` the API's format."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGone)
    async def _gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # for the metrics; the client is gone

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        method, path = request.method, show(request.url.path)
        if error.status_code == 404:
            told = ApiError(
                404,
                f"There is nothing at {path}; this server has /v1/completions, "
                "/v1/chat/completions, /v1/models, /health and /metrics.",
                code="not_found",
            )
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            if method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": f"{allowed}, OPTIONS"})
            told = ApiError(
                405,
                f"{path} can't be used with {method}; use {allowed}.",
                code="method_not_allowed",
                headers=error.headers,
            )
        else:
            told = ApiError(error.status_code, f"{error.detail}.", headers=error.headers)
        return told.response()
