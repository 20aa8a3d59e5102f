"""Clients of a real server that time the first token of a streamed answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

KEY = "the-key-of-this-benchmark"
READY = re.compile(r"kvtier serves \S+ on \S+ at http://(127\.0\.0\.1):(\d+)\n")
NUM_CLIENTS = 200
MAX_TOKENS = 16
SHORTEST, LONGEST = 8, 80
"""Range of words in a prompt, about four tokens each; log-uniform."""
LOOP_REQUESTS = 2
"""Requests of a client per round of the load "again and again"."""
WORDS = ("return", "self", "def", "import", "value", "None", "yield", "class", "raise", "while")
OPTIONS = ("--max-running", "256", "--max-queue", "512", "--device-capacity", "768MiB")

Address = tuple[str, int]


@dataclass(slots=True)
class Round:
    """Seconds from the first byte of each request to the first text of its answer."""

    seconds: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return float(np.percentile(self.seconds, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.seconds, 99))


@dataclass(frozen=True, slots=True)
class Load:
    """One load pattern and its rounds, without the first one, which warms up."""

    name: str
    num_clients: int
    rounds: Sequence[Round]


@contextmanager
def server(*options: str) -> Iterator[Address]:
    """Run ``kvtier serve`` with its defaults plus ``options`` on a free port. Yield its address."""
    serve = (sys.executable, "-m", "kvtier.tools.cli", "serve", "--port", "0", "--threads", "1")
    command = [*serve, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KVTIER_API_KEY": KEY}
    )
    try:
        assert process.stdout is not None
        ready = READY.fullmatch(process.stdout.readline())
        assert ready, "the server does not start"
        yield ready[1], int(ready[2])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def first_tokens(num_clients: int, rounds: int) -> list[Load]:
    """Measure both loads in turn.

    Afterwards some prompts are sent again one by one: their answers must begin with the same text.
    """
    once, again = list[Round](), list[Round]()
    rng, begun = random.Random(0), dict[str, str]()
    with server(*OPTIONS) as address:
        await one_round(burst, address, rng, max(2, num_clients // 4), begun)
        for _ in range(rounds):
            once.append(await one_round(burst, address, rng, num_clients, begun))
            again.append(await one_round(loop, address, rng, num_clients, begun))
        for prompt in rng.sample(sorted(begun), 8):
            _, text = await ask(address, prompt)
            assert text == begun[prompt], "another first token than under load"
    return [Load("all at once", num_clients, once), Load("again and again", num_clients, again)]


Client = Callable[[Address, random.Random, Round, dict[str, str]], Awaitable[None]]


async def one_round(
    client: Client, address: Address, rng: random.Random, num_clients: int, begun: dict[str, str]
) -> Round:
    """Run ``num_clients`` clients of a kind until all have ended."""
    found = Round()
    seeds = [random.Random(rng.random()) for _ in range(num_clients)]
    await asyncio.gather(*(client(address, seed, found, begun) for seed in seeds))
    return found


async def burst(address: Address, rng: random.Random, found: Round, begun: dict[str, str]) -> None:
    """Send one request."""
    prompt = make_prompt(rng)
    seconds, begun[prompt] = await ask(address, prompt)
    found.seconds.append(seconds)


async def loop(address: Address, rng: random.Random, found: Round, begun: dict[str, str]) -> None:
    """Send requests, each as soon as the previous answer is complete."""
    for _ in range(LOOP_REQUESTS):
        await burst(address, rng, found, begun)


def make_prompt(rng: random.Random) -> str:
    """Return a new prompt."""
    num_words = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
    words = (f"{rng.choice(WORDS)}_{rng.randrange(100)}" for _ in range(num_words))
    return f"# {rng.random()}\n" + " ".join(words)


async def ask(address: Address, prompt: str) -> tuple[float, str]:
    """Send a request. Return the seconds until the first text, and that text.

    The answer is read to its end.
    """
    body = json.dumps(
        {
            "model": "kvtier-tiny",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection(*address)
    began = time.perf_counter()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    seconds, first, usage = 0.0, "", None
    async for line in reader:
        if not line.startswith(b"data: {"):
            assert not line.startswith(b"HTTP/1.1 ") or line.split()[1] == b"200", line
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        if not first and event["choices"] and event["choices"][0]["text"]:
            seconds, first = time.perf_counter() - began, event["choices"][0]["text"]
    writer.close()
    assert usage is not None, "the answer has no end"
    assert usage["completion_tokens"] == MAX_TOKENS
    assert first, "an answer without text"
    return seconds, first
