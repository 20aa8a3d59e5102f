"""Traces of ``kvtier serve --record``, read and written; see ``observe/recording/format.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import MARK, VERSION, Header, LineWriter, unpacked
from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.lines import TraceLine, check_counts, shown

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions
    from kvtier.tools.replay.trace import Keys

NAME = "kvtier record"


def recognises(line: TraceLine) -> bool:
    return line.text.lstrip().startswith("{") and f'"{MARK}"' in line.text[:64]


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    builder: TraceBuilder | None = None
    rows: list[Keys] = []
    started, notes = 0.0, []
    for line in lines:
        if recognises(line):
            header = line.json()
            tokens = _block_tokens(line, header)
            if builder is None:
                builder = TraceBuilder(tokens, options.coarsen)
            elif tokens != builder.block_tokens:
                line.refuse(f"blocks of {tokens} tokens, after some of {builder.block_tokens}")
            started, rows = line.number_of(header, "started"), []
            continue
        if not line.text.endswith("\n") and not _is_whole(line):
            notes.append(line.cut_short())
            break
        if builder is None:
            line.refuse("a request before the header")
        fields = line.json()
        try:
            time_s, input_tokens, output_tokens, row, keep, text = fields
            check_counts(row, keep, input_tokens, output_tokens)
            line.check_room(keep + len(text) // KEY_CHARACTERS, builder)
            before = rows[row][:keep] if keep else _NONE
            if len(before) < keep:
                raise ValueError(f"row {row} has no {keep} blocks")
            keys = np.concatenate([before, unpacked(text)])
            time_s = started + float(time_s)
            check_counts(abs(time_s))
        except ConfigError:
            raise
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            line.refuse(f"no request of a recording: {error}")
        rows.append(keys)
        builder.add(time_s, chained(keys), int(input_tokens), int(output_tokens))
    assert builder is not None, "the first line was recognised as a header"
    return builder.build(notes)


_NONE = np.zeros(0, np.uint64)
KEY_CHARACTERS = 12
"""Characters of base64 that a key takes, rounded up."""


def _block_tokens(line: TraceLine, header: dict[str, Any]) -> int:
    if header.get(MARK) != VERSION:
        line.refuse(f"version {shown(header.get(MARK))} of the format; this kvtier reads {VERSION}")
    return line.block_tokens_of(header, "block_tokens")


def _is_whole(line: TraceLine) -> bool:
    try:
        json.loads(line.text)
    except (ValueError, RecursionError):
        return False
    return True


def write_trace(trace: Trace, salt: str, path: Path) -> int:
    """Write a trace as a recording. Return the number of bytes written.

    Args:
        trace: the trace.
        salt: name of the salt with which the keys were made.
        path: the file.

    Raises:
        ConfigError: the file exists already, or the trace has no contents.
    """
    if not trace.has_contents:
        raise ConfigError("there is nothing to record of lengths alone; replay the trace itself")
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
