"""Traces of lengths without contents, as CSV: of Azure, and BurstGPT.

Azure: ``TIMESTAMP,ContextTokens,GeneratedTokens``. BurstGPT: ``Timestamp,Model,Request tokens,
Response tokens,Total tokens,Log Type``. Nothing in them says which prompts begin alike, so every
block is taken as a new one, and the trace is marked by ``has_contents=False``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.lines import TraceLine

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions

NAME = "Azure, BurstGPT"

COLUMNS = {
    "time": ("timestamp", "arrived_at", "arrival_time"),
    "input": ("contexttokens", "request tokens", "num_prefill_tokens", "input_length"),
    "output": ("generatedtokens", "response tokens", "num_decode_tokens", "output_length"),
}
"""Names of the columns, in lower case."""


def recognises(line: TraceLine) -> bool:
    return {"time", "input"} <= _places(line).keys()


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    places = _places(next(lines))
    tokens = options.chains.block_tokens
    builder = TraceBuilder(tokens, options.coarsen)
    num_blocks = file_number << 40
    for line in lines:
        row = _cells(line)
        if len(row) <= max(places.values()):
            line.refuse(f"{len(row)} columns, and fewer than the header has")
        cells = {name: row[place].strip() for name, place in places.items()}
        counts = {
            name: line.count_of({name: _number(cell)}, name)
            for name, cell in cells.items()
            if name != "time"
        }
        blocks = counts["input"] // tokens
        line.check_room(blocks, builder)
        own = np.arange(num_blocks, num_blocks + blocks, dtype=np.uint64)
        num_blocks += blocks + 1
        output_tokens = counts.get("output", 0)
        builder.add(_time_s(line, cells["time"]), chained(own), counts["input"], output_tokens)
    return replace(builder.build(), has_contents=False)


def _places(header: TraceLine) -> dict[str, int]:
    """Return the place of each column that is known."""
    names = [name.strip().lower() for name in _cells(header)]
    return {
        column: names.index(name)
        for column, known in COLUMNS.items()
        for name in known
        if name in names
    }


def _cells(line: TraceLine) -> list[str]:
    try:
        return next(csv.reader([line.text.rstrip("\r\n")]), [])
    except csv.Error:
        return []


def _number(cell: str) -> object:
    try:
        return float(cell)
    except ValueError:
        return cell


def _time_s(line: TraceLine, cell: str) -> float:
    number = _number(cell)
    if isinstance(number, float):
        return line.number_of({"time": number}, "time")
    return line.time_of(cell, "time")
