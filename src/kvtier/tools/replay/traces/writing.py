"""Writes a trace as ``kvtier serve --record`` would have."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.recording import Header, LineWriter
from kvtier.tools.replay.trace import Trace


def write_trace(trace: Trace, salt: str, path: Path) -> int:
    """Returns its bytes.

    salt: the name of what the keys were made with. Raises ``ConfigError`` where ``path`` is there
    already.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"to: {path} is there already; name another file") from error
    writer = LineWriter()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(Header(trace.block_tokens, salt, 0.0).line())
        for at in range(trace.num_requests):
            file.write(
                writer.line(
                    float(trace.times[at]),
                    int(trace.input_tokens[at]),
                    int(trace.output_tokens[at]),
                    trace.keys[trace.offsets[at] : trace.offsets[at + 1]],
                )
            )
        return file.tell()
