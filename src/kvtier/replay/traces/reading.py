"""Which format a file has is seen from its first line, whatever it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from kvtier.errors import ConfigError
from kvtier.recording import Chains
from kvtier.replay.trace import Trace, joined
from kvtier.replay.traces import agentic, hashed, recorded, request_log
from kvtier.replay.traces.lines import Line, lines_of

LOG_LINES = 20_000
"""A log says other things before its first request: as many lines are looked at."""

TIME_OF_DAY = 1e8
"""Seconds: later times were told by a clock, earlier ones count from the trace's own start."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """chains: makes keys where a file has token ids; their ``block_tokens`` counts for logs only.

    block_tokens: of hashed blocks; 0 takes what the format has. coarsen: so many blocks become one.
    sessions, hours, seed, shared_prefix: for files of sessions without a start: how many to take (0
    for all), the hours over which their starts are drawn, and whether sessions with equal lengths
    of tools and system prompt share these.
    """

    chains: Chains
    block_tokens: int = 0
    coarsen: int = 1
    sessions: int = 0
    hours: float = 8.0
    seed: int = 11
    shared_prefix: bool = True

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 0), ("coarsen", 1), ("sessions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}")
        if not 0 < self.hours < 1e5:
            raise ConfigError(f"hours: {self.hours} is no time to draw starts from")


class Format(Protocol):
    """A module that reads one format."""

    NAME: str

    def recognises(self, line: Line) -> bool:
        """Whether a file that begins with this line, or has it, is of this format."""

    def read(self, lines: Iterator[Line], options: ReadOptions, file_number: int) -> Trace:
        """All requests. file_number: sets apart what two files call their blocks."""


FORMATS: tuple[Format, ...] = (recorded, hashed, agentic, request_log)

Tell = Callable[[int, int], None]
"""How far reading is: (bytes, of bytes)."""


def read_traces(paths: Sequence[Path], options: ReadOptions, tell: Tell | None = None) -> Trace:
    """The requests of all files together, each on its own clock unless it says the time of day.

    Raises ``ConfigError`` for a file that can't be read, with its line.
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
    if not trace.num_references:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no request has a whole block of {trace.block_tokens} "
            "tokens; nothing can be replayed"
        )
    return trace


def _on_one_clock(traces: Sequence[Trace]) -> Trace:
    """All of them, from 0 s on."""
    starts = [float(trace.times[0]) if trace.num_requests else 0.0 for trace in traces]
    if len(traces) > 1 and min(starts) < TIME_OF_DAY:
        note = "The traces were laid over each other, each from its own start."
        traces = [
            replace(trace, times=trace.times - start, notes=(*trace.notes, note))
            for trace, start in zip(traces, starts, strict=True)
        ]
    whole = joined(traces)
    return replace(whole, times=whole.times - whole.times[:1].sum())


def _read(path: Path, options: ReadOptions, number: int, tell: Callable[[int], None]) -> Trace:
    lines = lines_of(path, tell)
    seen: list[Line] = []
    for line in lines:
        seen.append(line)
        for each in FORMATS:
            if each.recognises(line):
                return each.read(chain(seen, lines), options, number)
        if len(seen) >= LOG_LINES:
            break
    if not seen:
        raise ConfigError(f"{path}: empty; there is nothing to replay")
    raise ConfigError(
        f"{path}: none of the known traces ({', '.join(each.NAME for each in FORMATS)}); a log of "
        "requests must have their token ids: docs/guides/sizing.md says how"
    )
