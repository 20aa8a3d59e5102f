"""kvtier's request headers, which ask for more than the body can."""

from __future__ import annotations

from starlette.requests import Request

from kvtier.serve.server.errors import bad_request, show

EXPLAIN_HEADER = "X-KVTier-Explain"
"""Request header that adds the source of each prompt's tokens to the usage in the answer, or in the
last chunk of a stream. It is a header because other servers refuse unknown fields of the body."""


def wants_explanation(request: Request) -> bool:
    """Whether the header asks for an explanation. Raises ``ApiError`` for an invalid value."""
    value = request.headers.get(EXPLAIN_HEADER, "0").strip()
    if value not in ("0", "1"):
        raise bad_request(f"{EXPLAIN_HEADER} is {show(value)}; send 1 to have it, or 0.")
    return value == "1"
