"""Detect the format of a file from its first line, and read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from kvtier.core.errors import ConfigError
from kvtier.tools.replay.options import ReadOptions
from kvtier.tools.replay.trace import Trace, joined
from kvtier.tools.replay.traces import agentic, hashed, lengths, recorded, request_log, texts
from kvtier.tools.replay.traces.clock import YEAR_S
from kvtier.tools.replay.traces.lines import TraceLine, lines_of
from kvtier.tools.replay.traces.log_lines import log_lines
from kvtier.tools.replay.traces.plausible import check_blocks, check_window

TIME_OF_DAY = 1e8
"""Seconds. Larger times are since 1970, smaller ones since the trace's own start."""


class Format(Protocol):
    """Module that reads one format."""

    NAME: str

    def recognises(self, line: TraceLine) -> bool:
        """Whether a line (the first one of a file, or any one of a log) is of this format."""

    def read(self, lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
        """Return the trace. file_number: distinguishes the block ids of different files."""


TABLES: tuple[Format, ...] = (recorded, hashed, agentic, texts, lengths)
"""Formats in which every line is a request. The others are logs, with other lines, too."""
FORMATS: tuple[Format, ...] = (*TABLES, request_log)

Tell = Callable[[int, int], None]
"""Progress callback: (bytes read, total bytes)."""


def read_traces(paths: Sequence[Path], options: ReadOptions, tell: Tell | None = None) -> Trace:
    """Return the requests of all files, merged.

    Files without absolute times are aligned at their starts. Raises ``ConfigError``, with the line,
    for a file that can't be read.
    """
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    traces = []
    for number, path in enumerate(paths):
        before = sum(sizes[:number])

        def told(done: int, before: int = before) -> None:
            if tell is not None:
                tell(before + done, sum(sizes))

        traces.append(_read(path, options, number, told))
        told(sizes[number])
    trace = _on_one_clock(traces)
    check_window(", ".join(map(str, paths)), trace)
    if not trace.num_references:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no request has a whole block of {trace.block_tokens} "
            "tokens; nothing can be replayed"
        )
    return trace


def _on_one_clock(traces: Sequence[Trace]) -> Trace:
    """Return the traces merged, with times from 0 s on."""
    starts = [float(trace.times[0]) if trace.num_requests else 0.0 for trace in traces]
    if len(traces) > 1 and not any(trace.has_year for trace in traces):
        # Each gets the year that brings it closest to the first one.
        years = [round((starts[0] - start) / YEAR_S) for start in starts]
        traces = [
            replace(trace, times=trace.times + year * YEAR_S)
            for trace, year in zip(traces, years, strict=True)
        ]
    elif len(traces) > 1 and not all(
        trace.has_year and start >= TIME_OF_DAY for trace, start in zip(traces, starts, strict=True)
    ):
        note = "The traces were laid over each other, each from its own start."
        traces = [
            replace(trace, times=trace.times - start, notes=(*trace.notes, note))
            for trace, start in zip(traces, starts, strict=True)
        ]
    whole = joined(traces)
    return replace(whole, times=whole.times - whole.times[:1].sum())


def _read(path: Path, options: ReadOptions, number: int, tell: Callable[[int], None]) -> Trace:
    lines = lines_of(path, tell)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{path}: empty; there is nothing to replay")
    for each in TABLES:
        if each.recognises(first):
            trace = each.read(chain([first], lines), options, number)
            check_blocks(path, trace)
            return trace
    lines = log_lines(chain([first], lines))
    for line in lines:
        if request_log.recognises(line):
            return request_log.read(chain([line], lines), options, number)
    raise ConfigError(
        f"{path}: none of the known traces ({', '.join(each.NAME for each in FORMATS)}): its first "
        "line is of none of them, and no line has a request with token ids. Have a server log "
        "these: vLLM by --enable-log-requests with VLLM_LOGGING_LEVEL=DEBUG, SGLang by "
        "--log-requests --log-requests-level 3"
    )
