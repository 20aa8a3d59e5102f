"""A real ``kvtier serve`` in a process of its own, and prompts for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.kit.servers import free_port

START_S = 600.0
KEY = "the-page's-key"
SMALL = (
    *("--device", "cpu", "--threads", "1", "--device-capacity", "6MiB"),
    *("--host-capacity", "8MiB", "--disk-capacity", "64MiB"),
)
"""Tiers so small that a few prompts pass through all of them."""


class Serve:
    """A ``kvtier serve`` that the constructor starts. ``log`` is the file of its output."""

    def __init__(self, folder: Path, *options: str, key: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "serve.log"
        self._folder = folder
        self._options = options
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.observe.live.serve_faulty", "serve", "kvtier-tiny"]
        command += ["--port", str(self.port), "--disk-path", str(self._folder / "disk")]
        env = dict(os.environ)
        if self._key is not None:
            env["KVTIER_API_KEY"] = self._key
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *SMALL, *self._options], stdout=log, stderr=log, env=env
            )
        end_s = time.monotonic() + START_S
        while not self._answers():
            is_gone = self._process.poll() is not None
            if is_gone or time.monotonic() > end_s:
                self.stop()
                raise RuntimeError(f"no server: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ask(self, prompt: str, max_tokens: int = 2) -> dict[str, Any]:
        body = {"model": "kvtier-tiny", "prompt": prompt, "max_tokens": max_tokens}
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def work(self, num_prompts: int = 6, turns: int = 2) -> None:
        """Request the same prompts repeatedly. Together they exceed the device tier."""
        for _ in range(turns):
            for number in range(num_prompts):
                self.ask(prompt(number))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    close = stop


def prompt(number: int) -> str:
    """Return a prompt of some hundred tokens; each number gives another text."""
    lines = (f"def story_{number}_{at}(self):\n    return {at} * {number}\n\n" for at in range(60))
    return "".join(lines)
