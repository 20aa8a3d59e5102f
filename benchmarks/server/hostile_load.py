"""Requests that nobody honest sends, as cheap for the sender as can be. Loopback only.

    python -m benchmarks.server.hostile_load 127.0.0.1 8000 KEY --requests 1000 --seconds 20

prints, per kind, how its requests ended: {"spaces": {"400": 111}, ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

BODY_BYTES = 8 << 20
PATIENCE_S = 20.0
"""Longest time of a request, slow ones included: bounds the load in time."""
DRIP_S = 0.25


def filled(head: bytes, middle: bytes, tail: bytes) -> bytes:
    """About ``BODY_BYTES``, most of it ``middle`` again and again."""
    room = BODY_BYTES - len(head) - len(tail)
    return head + middle * (room // len(middle)) + tail


MESSAGES = filled(b'{"model":"kvtier-tiny","messages":[', b"{},", b"{}]}")
PROMPTS = filled(b'{"model":"kvtier-tiny","prompt":[', b"[1],", b"[1]]}")
SPACES = filled(b'{"model":"kvtier-tiny","prompt":"', b" ", b'"}')
TEXT = b'"' + b" " * 131_000 + b'"'
TEXTS = filled(b'{"model":"kvtier-tiny","max_tokens":8000,"prompt":[', TEXT + b",", TEXT + b"]}")
"""Each fits the model's context, and has to be tokenized; only then there is no room to answer."""
DEEP = filled(b'{"model":"kvtier-tiny","prompt":', b"[", b"")
DIGITS = b'{"model":"kvtier-tiny","prompt":"x","seed":' + b"7" * 1_000_000 + b"}"
STREAM = b'{"model":"kvtier-tiny","prompt":"import","max_tokens":500,"stream":true}'


class Hostile:
    """The kinds; each gives how it ended: a status, "closed" by the server, or "patience"."""

    def __init__(self, host: str, port: int, key: str) -> None:
        if host not in ("127.0.0.1", "::1"):
            raise SystemExit(f"host: {host!r} is not this machine; this load is for loopback only")
        self._address = (host, port)
        self._key = key
        self.kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "messages": lambda: self.send("chat/completions", MESSAGES),
            "prompts": lambda: self.send("completions", PROMPTS),
            "digits": lambda: self.send("completions", DIGITS),
            "deep": lambda: self.send("completions", DEEP),
            "spaces": lambda: self.send("completions", SPACES),
            "texts": lambda: self.send("completions", TEXTS),
            "wrong key": lambda: self.send("completions", SPACES, key="wrong"),
            "slow header": lambda: self.drip(b"GET /v1/models HTTP/1.1\r\nX-Slow: "),
            "slow body": lambda: self.drip(self.head("completions", BODY_BYTES) + SPACES[:1000]),
            "aborted": self.abort,
            "connection": lambda: self.drip(b""),
        }

    def head(self, path: str, length: int, key: str | None = None) -> bytes:
        return (
            f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self._key}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    @contextmanager
    def socket(self) -> Iterator[socket.socket]:
        with socket.socket() as made:
            made.setblocking(False)
            yield made

    async def send(self, path: str, body: bytes, key: str | None = None) -> str:
        """A whole request, and its answer's status."""
        loop = asyncio.get_running_loop()
        with self.socket() as made:
            await loop.sock_connect(made, self._address)
            reading = asyncio.ensure_future(loop.sock_recv(made, 4096))
            try:
                await loop.sock_sendall(made, self.head(path, len(body), key))
                await loop.sock_sendall(made, body)
            except OSError:
                pass  # refused before it was sent: the answer may be there
            try:
                return status_of(await reading)
            finally:
                reading.cancel()

    async def drip(self, begin: bytes) -> str:
        """A byte at a time until the server has enough of it; without ``begin`` nothing at all."""
        loop = asyncio.get_running_loop()
        with self.socket() as made:
            await loop.sock_connect(made, self._address)
            await loop.sock_sendall(made, begin)
            reading = asyncio.ensure_future(loop.sock_recv(made, 4096))
            try:
                while not (await asyncio.wait({reading}, timeout=DRIP_S))[0]:
                    if begin:
                        await loop.sock_sendall(made, b"x")
                return status_of(reading.result())
            finally:
                reading.cancel()

    async def abort(self) -> str:
        """A stream that is left after its first bytes."""
        loop = asyncio.get_running_loop()
        with self.socket() as made:
            await loop.sock_connect(made, self._address)
            await loop.sock_sendall(made, self.head("completions", len(STREAM)) + STREAM)
            return status_of(await loop.sock_recv(made, 4096))

    async def run(
        self, num_requests: int, seconds: float, names: list[str]
    ) -> dict[str, Counter[str]]:
        """``num_requests``, the kinds in turn, begun evenly over ``seconds``."""
        ends: dict[str, Counter[str]] = defaultdict(Counter)

        async def one(at: int) -> None:
            await asyncio.sleep(seconds * at / num_requests)
            name = names[at % len(names)]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    end = await self.kinds[name]()
            except TimeoutError:
                end = "patience"
            except OSError:
                end = "closed"
            ends[name][end] += 1

        await asyncio.gather(*(one(at) for at in range(num_requests)))
        return ends


def status_of(answer: bytes) -> str:
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.hostile_load", description=__doc__
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("key")
    parser.add_argument("--requests", type=int, default=1000, help="(1000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="they are spread over (20)")
    parser.add_argument("--kinds", nargs="+", help="(all)")
    options = parser.parse_args()
    hostile = Hostile(options.host, options.port, options.key)
    kinds = options.kinds or list(hostile.kinds)
    ends = asyncio.run(hostile.run(options.requests, options.seconds, kinds))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
