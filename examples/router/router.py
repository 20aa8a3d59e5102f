"""Router that sends each request to the server where it costs the fewest seconds.

    python router.py http://10.0.0.1:8000 http://10.0.0.2:8000 --port 9000

It asks every server what a request would cost there: the request's own path, with ``/cost`` behind
it. It holds no index, keeps no state of prompts, and can be restarted or doubled at any time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PATHS = ("/v1/completions", "/v1/chat/completions")
DEADLINE_S = 0.25
"""Time for a server to estimate a cost. It answers between two steps of its engine."""
ALIKE = 1.25
"""Costs within this factor of the lowest are equal: measured rates of equal machines differ so."""
MAX_BODY_BYTES = 32 << 20
NOT_PASSED = frozenset({b"host", b"connection", b"content-length", b"transfer-encoding", b"expect"})
"""Headers that belong to one connection, not to the request or the answer."""


@dataclass(eq=False)
class Server:
    """One of the servers. num_running: requests that it has not answered completely."""

    url: str
    num_running: int = 0
    num_sent: int = 0

    @property
    def load(self) -> tuple[int, int]:
        return self.num_running, self.num_sent


class Relayed(StreamingResponse):
    """Answer of a server, passed on as it arrives."""

    def __init__(self, server: Server, answer: httpx.Response) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code)
        self.raw_headers = _passed(answer.headers.raw)
        self._server, self._answer = server, answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the end of the answer, or the client has gone
            self._server.num_running -= 1
            await self._answer.aclose()


class Router:
    """Passes requests on to servers of the same model."""

    def __init__(self, urls: Sequence[str], deadline_s: float = DEADLINE_S) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self._deadline_s, limits = deadline_s, httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def generate(self, request: Request) -> Response:
        """Pass a request on to the server where it is cheapest."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return Response(f"The body is longer than {MAX_BODY_BYTES} bytes.", 413)
        asked = (self._cost_s(server, request, body) for server in self.servers)
        costs = await asyncio.gather(*asked)
        return await self._pass(cheapest_first(self.servers, costs), request, body)

    async def models(self, request: Request) -> Response:
        """Return the models of any server: all have the same."""
        return await self._pass(self.servers, request)

    async def _cost_s(self, server: Server, request: Request, body: bytes) -> float:
        """Return the seconds of a request on a server; infinite if it does not answer in time."""
        url, headers = f"{server.url}{request.url.path}/cost", _passed(request.headers.raw)
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._client.post(url, content=body, headers=headers)
            return float(sum(cost["seconds"] for cost in answer.raise_for_status().json()["costs"]))
        except (TimeoutError, httpx.HTTPError, KeyError, TypeError, ValueError):
            return inf

    async def _pass(
        self, servers: Sequence[Server], request: Request, body: bytes | None = None
    ) -> Response:
        """Pass a request on to the first of the servers that can be reached."""
        method, path, headers = request.method, request.url.path, _passed(request.headers.raw)
        for server in servers:
            url = server.url + path
            passed = self._client.build_request(method, url, headers=headers, content=body)
            server.num_running += 1
            server.num_sent += 1
            try:
                return Relayed(server, await self._client.send(passed, stream=True))
            except httpx.ConnectError:
                server.num_running -= 1
            except BaseException:  # the server may have begun: not sent again
                server.num_running -= 1
                raise
        return Response("No server can be reached.", 503)

    @property
    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> Any:
            async with self._client:
                yield

        routes = [Route(path, self.generate, methods=["POST"]) for path in PATHS]
        return Starlette(routes=[*routes, Route("/v1/models", self.models)], lifespan=lifespan)


def cheapest_first(servers: Sequence[Server], costs: Sequence[float]) -> list[Server]:
    """Return the servers, by their seconds; of equal ones the least loaded first."""
    equal_s = ALIKE * min(costs)
    ranks = (0.0 if cost <= equal_s else cost for cost in costs)
    rank_of = dict(zip(servers, ranks, strict=True))
    return sorted(servers, key=lambda server: (rank_of[server], server.load))


def _passed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in NOT_PASSED]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send each request to the cheapest server.")
    parser.add_argument("servers", nargs="+", metavar="URL", help="http://HOST:PORT of each server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S)
    options = parser.parse_args()
    if not all(url.startswith(("http://", "https://")) for url in options.servers):
        parser.error("each URL has to begin with http:// or https://")
    app = Router(options.servers, options.deadline_s).app
    uvicorn.run(app, host=options.host, port=options.port, date_header=False)
