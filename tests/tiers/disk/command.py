"""Run ``kvtier`` in a subprocess with limits, for slabs that may be damaged."""

from __future__ import annotations

import resource
import subprocess
import sys


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run ``kvtier`` in a process of its own with little memory and time, so that a crash shows."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    return subprocess.run(
        [sys.executable, "-m", "kvtier.tools.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )
