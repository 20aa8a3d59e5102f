"""HTTP routes of a running cache's control that node and server share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.control.contract import (
    CacheControl,
    ControlError,
    Deleted,
    HintedPrompt,
    PinnedBlocks,
    PromptName,
    PromptPlaces,
    read_hint,
)
from kvtier.core.errors import CacheError

PATHS = frozenset({"/lookup", "/prefetch", "/pin", "/unpin", "/hint", "/delete", "/clear"})


class ControlBody(BaseModel, extra="forbid"):
    """Body of a request. Unknown fields are refused.

    A deletion with a misspelt ``prompt`` would delete all blocks of the tenant.
    """


class PromptBody(ControlBody):
    """A prompt.

    In a node it is named by the keys of its blocks in their order, in hexadecimal; in a server by
    its text, its token ids or a chat, with the ``cache_salt`` of its requests as ``tenant``.
    """

    room: str = ""
    keys: list[str] | None = None
    prompt: str | list[int] | None = None
    tenant: str = ""
    chat: dict[str, object] | None = None
    timeout_s: float = 10.0

    def named(self) -> PromptName:
        """Return the prompt. Raises ``ControlError`` if none is named, or two.

        Raises ``UnicodeEncodeError`` for a text with half of a surrogate pair.
        """
        for text in self.tenant, self.prompt:
            if isinstance(text, str):
                text.encode()
        if [self.keys, self.prompt, self.chat].count(None) != 2:
            raise ControlError("name the prompt by exactly one of keys, prompt and chat")
        return PromptName(self.room, self.keys, self.prompt, self.tenant, self.chat)


class PinBody(PromptBody):
    """Blocks to be kept in memory for some seconds."""

    seconds: float


class UnpinBody(ControlBody):
    """A pin to be ended."""

    room: str = ""
    number: int


class HintBody(PromptBody):
    """A hint on a prompt. kvtier: as in requests."""

    kvtier: dict[str, object]


class DeleteBody(PromptBody):
    """Blocks to be deleted: those of a prompt, or all of a room or a tenant."""

    timeout_s: float = 60.0


class ClearBody(ControlBody):
    """Rooms to be emptied: one, or all."""

    room: str = ""
    memory_only: bool = False
    timeout_s: float = 60.0


def refusal(error: CacheError) -> JSONResponse:
    """Return the answer to a request that can't be carried out."""
    is_unknown = isinstance(error, ControlError) and error.is_unknown
    return JSONResponse({"error": str(error)}, 404 if is_unknown else 400)


def _invalid(error: RequestValidationError) -> ControlError:
    """Return one sentence about a body, without its values: FastAPI's answer repeats the prompt.

    Names are in ASCII: they may have half of a surrogate pair.
    """
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:]))
    if not name or first["type"] == "json_invalid":
        return ControlError(
            'the body must be a JSON object, sent with the header "Content-Type: application/json"'
        )
    if first["type"] == "extra_forbidden":
        return ControlError(f"{name!a} is no field of this request")
    return ControlError(f"{name!a}: {first['msg']}")


class ControlRoute(APIRoute):
    """Route that refuses by ``CacheError``, bodies that do not fit, and text that has no bytes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def refusing(request: Request) -> Response:
            try:
                return await handle(request)
            except CacheError as error:
                return refusal(error)
            except UnicodeEncodeError:  # JSON can write half of a pair
                return refusal(ControlError("a text has half of a surrogate pair; send characters"))
            except RequestValidationError as error:
                return refusal(_invalid(error))

        return refusing


def control_router(control: CacheControl) -> APIRouter:
    """Return the routes of ``PATHS``."""
    router = APIRouter(route_class=ControlRoute)

    @router.post("/lookup")
    async def lookup(body: PromptBody) -> PromptPlaces:
        """Find the blocks of a prompt."""
        return await control.lookup(body.named(), body.timeout_s)

    @router.post("/prefetch")
    async def prefetch(body: PromptBody) -> PromptPlaces:
        """Read the blocks of a prompt from storage into memory."""
        return await control.prefetch(body.named(), body.timeout_s)

    @router.post("/pin")
    async def pin(body: PinBody) -> PinnedBlocks:
        """Keep the blocks of a prompt in memory for a time."""
        return await control.pin(body.named(), body.seconds, body.timeout_s)

    @router.post("/unpin")
    async def unpin(body: UnpinBody) -> None:
        """End a pin before its time."""
        await control.unpin(body.room, body.number)

    @router.post("/hint")
    async def hint(body: HintBody) -> HintedPrompt:
        """Apply a hint to the blocks of a prompt while no request for it runs."""
        return await control.hint(body.named(), read_hint(body.kvtier))

    @router.post("/delete")
    async def delete(body: DeleteBody) -> Deleted:
        """Delete blocks from every tier. The answer contains whether it is complete."""
        if (body.keys, body.prompt, body.chat) == (None, None, None):
            return await control.delete_rooms(body.room, body.tenant, body.timeout_s)
        return await control.delete(body.named(), body.timeout_s)

    @router.post("/clear")
    async def clear(body: ClearBody) -> Deleted:
        """Delete the blocks of one room, or of all; or only evict them from memory."""
        return await control.clear(body.room, body.memory_only, body.timeout_s)

    return router


class HeadAsGet:
    """Middleware by which every route for GET also answers HEAD, which load balancers use.

    The HTTP server leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
