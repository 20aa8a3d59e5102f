"""Child process for calls that may hang, crash, or block all threads of their process.

It has a time limit, at which it is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

KILLED_S: Final = 2.0
"""Longest wait for a killed process. One that hangs in the kernel is left behind."""


class Overdue(Exception):  # noqa: N818 - what it is
    """The process exceeded its time limit. The message says whether it could be killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended. code: its exit status, or the negated signal number."""

    code: int
    output: str
    errors: str

    def __str__(self) -> str:
        """Describe the exit in words."""
        if self.code < 0:
            return f"its process ended by signal {-self.code}"
        last = (self.errors.strip().splitlines() or ["without a word"])[-1]
        return f"its process ended with {self.code}: {last}"


def run_module(
    module: str, *arguments: str, timeout_s: float, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run ``python -m`` with a time limit.

    variables: added to the environment.
    Returns at the latest ``KILLED_S`` after ``timeout_s``. Raises ``Overdue``, and ``OSError`` if
    no process can be started.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(variables or {})},
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Overdue(_kill(child)) from None
    except BaseException:
        _kill(child)
        raise
    return Ended(child.returncode, output, errors)


def _kill(child: subprocess.Popen[str]) -> str:
    """Kill the process and return the outcome in words."""
    child.kill()
    try:
        child.communicate(timeout=KILLED_S)
    except subprocess.TimeoutExpired:
        logger.warning("a process can't be killed pid=%d", child.pid)
        return f"left behind: process {child.pid} can't be killed"
    return "killed"
