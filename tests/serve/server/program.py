"""``kvtier serve`` as a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY = re.compile(r"kvtier serves (\S+) on cpu at (https?://127\.0\.0\.1:\d+)\n")


@contextmanager
def program(
    *options: str, python: str = sys.executable, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``kvtier serve``. Yield process and URL once it is ready. python: its interpreter."""
    command = [python, "-m", "kvtier.tools.cli", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--device-capacity", "64MiB", "--host-capacity", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = READY.fullmatch(line)
        assert ready, f"{line!r} {process.communicate(timeout=30)}"
        yield process, ready[2]
    finally:
        process.kill()
        process.communicate(timeout=30)
