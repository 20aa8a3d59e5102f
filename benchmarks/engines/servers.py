"""Server process of an engine, with or without a cache under it, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.engines.protocol import (
    Answer,
    Process,
    cpu_s_of,
    family_of,
    last_error,
    read_answer,
    running_processes,
)
from benchmarks.peers import ENVIRONMENTS

SERVED_AS = "model"
LOOPBACK = "127.0.0.1"
START_S = 300.0
STOP_S = 20.0
PAUSE_S = 0.1
QUIET_S = 5.0
IDLE = 0.2
"""Share of a core below which a server is quiet."""
REQUEST_S = 300.0
JSON_BODY = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens, as a server counts them."""

    prompt: float
    cached: float
    from_tier: float
    """Cached tokens that were not in the engine's device pool."""

    def since(self, before: Tokens) -> Tokens:
        return Tokens(
            self.prompt - before.prompt,
            self.cached - before.cached,
            self.from_tier - before.from_tier,
        )


def compute_cores() -> str:
    """Return the cores of an engine: all but the last, for all contestants."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:-1] or cores))


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a server."""

    device_blocks: int
    """Blocks of its device pool."""
    max_tokens: int = 4096
    """Most tokens of a request."""


@dataclass(frozen=True, slots=True)
class Contestant(ABC):
    """An engine and the cache under it.

    ``has_tier``: whether computed blocks are found again after the engine's own caches were
    emptied.
    """

    name: str
    environment: str
    """Folder of ``make peers`` whose interpreter runs it."""
    variables: dict[str, str] = field(default_factory=dict, kw_only=True)
    is_optional: bool = field(default=False, kw_only=True)
    """Whether it is left out if it is missing."""

    block: ClassVar[int]
    """Tokens of a block of the engine's pool."""
    reset_path: ClassVar[str]
    asked_with: ClassVar[Mapping[str, object]] = {"ignore_eos": True, "skip_special_tokens": False}
    """Further fields of a request. Every answer then has the requested number of tokens, and all of
    them are reported."""

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin" / "python"

    @property
    @abstractmethod
    def has_tier(self) -> bool: ...

    @property
    @abstractmethod
    def packages(self) -> list[str]:
        """Packages whose versions are reported."""

    @abstractmethod
    def command(self, model: Path, port: int, folder: Path, size: Size) -> list[str]:
        """Return the arguments of its interpreter. ``folder`` exists and belongs to this server."""

    @abstractmethod
    def environ(self) -> dict[str, str]:
        """Return its environment variables."""

    @abstractmethod
    def read_tokens(self, metrics: str) -> Tokens:
        """Return the tokens from the content of ``/metrics``."""


def words_of(arguments: dict[str, object]) -> list[str]:
    """Return the words of a command line. An option whose value is None has no argument."""
    return [str(word) for pair in arguments.items() for word in pair if word is not None]


def free_port() -> int:
    """Return a port on which no process listens at the moment."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


class Server:
    """A contestant's server on a loopback port. Close it."""

    def __init__(
        self,
        contestant: Contestant,
        model: Path,
        folder: Path,
        size: Size,
    ) -> None:
        self.contestant = contestant
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        command = contestant.command(model, self.port, folder, size)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [contestant.python, *command],
                cwd=folder,
                env={**os.environ, **contestant.environ()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def wait(self) -> None:
        """Wait until it answers. Raises RuntimeError with the reason if it ended instead."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise RuntimeError(last_error(self._log.read_text(errors="replace")))
            with suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"no answer within {START_S:.0f} s")

    def ask(
        self, prompt: Sequence[int], max_tokens: int, logprobs: int | None = None, **more: object
    ) -> Answer:
        """Complete a prompt of token ids, greedily. Raises RuntimeError if tokens are missing.

        more: further fields of the request.
        """
        body: dict[str, object] = {
            "model": SERVED_AS,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            **self.contestant.asked_with,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        if logprobs is not None:
            body["logprobs"] = logprobs
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_S)
        with closing(connection):
            data = json.dumps(body).encode()
            begin = time.perf_counter()
            connection.request("POST", "/v1/completions", data, JSON_BODY)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.contestant.name}: {response.read().decode()[:300]}")
            first = end = 0.0
            events = []
            for line in response:
                if line.startswith(b"data: {"):
                    end = time.perf_counter()
                    first = first or end
                    events.append(json.loads(line[6:]))
        answer = read_answer(events, 1000 * (first - begin), 1000 * (end - begin))
        if answer.num_tokens != max_tokens:
            raise RuntimeError(
                f"{self.contestant.name}: {answer.num_tokens} of {max_tokens} tokens came"
            )
        return answer

    def reset(self) -> None:
        """Empty the engine's own prefix cache, but not the cache under it."""
        path = self.contestant.reset_path
        status, text = self._request("POST", path)
        if status != 200:
            raise RuntimeError(f"{self.contestant.name}: {path}: {status} {text[:300]}")

    def settle(self) -> None:
        """Wait until it is quiet, for at most ``QUIET_S``.

        After its last step an engine may poll for work or store blocks, on the core on which the
        next contestant computes.
        """
        give_up = time.monotonic() + QUIET_S
        before = self.cpu_s()
        while time.monotonic() < give_up:
            time.sleep(PAUSE_S)
            now = self.cpu_s()
            if now - before <= IDLE * PAUSE_S:
                return
            before = now

    def tokens(self) -> Tokens:
        """Return the tokens of all prompts so far."""
        return self.contestant.read_tokens(self.metrics())

    def metrics(self) -> str:
        """Return the content of ``/metrics``."""
        return self._request("GET", "/metrics")[1]

    def cpu_s(self) -> float:
        """Return user and system seconds of its processes so far."""
        return sum(cpu_s_of(each.pid) for each in self._family())

    def close(self) -> None:
        """End the server and its children."""
        family = self._family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self._kill(family)

    def kill(self) -> None:
        """Kill the server and its children, as a crash does."""
        self._kill(self._family())

    def _kill(self, family: Sequence[Process]) -> None:
        still = {(each.pid, each.started) for each in running_processes()}
        for each in family:
            if (each.pid, each.started) in still:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
        self._process.wait()

    def _family(self) -> list[Process]:
        return family_of(self._process.pid, running_processes())

    def _request(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_S)
        with closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
