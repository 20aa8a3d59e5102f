"""Processes that answer JSON objects, one a line. Needs the standard library only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO


class LineProcess:
    """A contestant's process. It is idle between its turns.

    Args:
        name: of the contestant.
        python: interpreter of its environment.
        arguments: of the interpreter.
        variables: further environment variables.
    """

    def __init__(
        self,
        name: str,
        python: Path | str,
        arguments: Sequence[object],
        variables: Mapping[str, str] = {},
    ) -> None:
        self.name = name
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [python, "-W", "ignore", *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises RuntimeError with the reason if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            lines = self._complaints.read().strip().splitlines()
            # Threads may print more after the exception.
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise RuntimeError(f"{self.name}: {(errors or lines or ['it ended'])[-1]}")
        return json.loads(line)

    def ask(self, do: str, **what: object) -> dict[str, Any]:
        """Run a command in the process. Raises AssertionError if results are wrong."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        answer = self.answer()
        if answer.get("wrong"):
            raise AssertionError(f"{self.name}: {answer['wrong']} wrong blocks in {do}")
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._complaints.close()


def take_stdout() -> TextIO:
    """Return a stream for answers. No output of a library, also from C, mixes with them."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, hello: Mapping[str, object], do: Callable[..., object]) -> None:
    """Write ``hello``, and then what ``do`` returns for the object in each line of stdin."""
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(do(**json.loads(line))), file=answers, flush=True)
