"""Headers of kvtier with which a client asks for more than the body does."""

from __future__ import annotations

from starlette.requests import Request

from kvtier.server.errors import bad_request, show

EXPLAIN_HEADER = "X-KVTier-Explain"
"""Where each prompt came from, in the usage of the answer, of a streamed one in its last chunk. A
header, and no field of the body: other servers refuse fields that they don't know, and clients add
headers to any request."""


def wants_explanation(request: Request) -> bool:
    """Whether the header asks for it; ``ApiError`` where it says neither yes nor no."""
    value = request.headers.get(EXPLAIN_HEADER, "0").strip()
    if value not in ("0", "1"):
        raise bad_request(f"{EXPLAIN_HEADER} is {show(value)}; send 1 to have it, or 0.")
    return value == "1"
