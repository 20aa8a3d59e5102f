"""Traces with block ids: of Mooncake, and of Qwen on Bailian.

Mooncake: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens each.
Bailian: also ``chat_id``, ``parent_chat_id``, ``type``, ``turn``; ``timestamp`` in seconds, 16
tokens per id. A partial last block counts as a block. Other tools write such traces in other units,
so the whole trace is checked against ``input_length`` and time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.lines import TraceLine
from kvtier.tools.replay.traces.plausible import check_block_tokens, check_rate

if TYPE_CHECKING:
    from kvtier.tools.replay.traces.options import ReadOptions

NAME = "Mooncake, Bailian"
MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16
UNITS_S = {"s": 1.0, "ms": 1e-3}
SINCE_1970_S, SINCE_1970_MS = 1e9, 1e11
"""Least times that are taken as times since 1970, in seconds and in ms."""


def recognises(line: TraceLine) -> bool:
    if not line.text.lstrip().startswith("{"):
        return False
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and (
        "hash_ids" in fields or fields.keys() >= {"input_length", "output_length"}
    )


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    first = next(lines)
    is_bailian = '"chat_id"' in first.text
    tokens = options.block_tokens or (BAILIAN_TOKENS if is_bailian else MOONCAKE_TOKENS)
    unit = options.time_unit if options.time_unit in UNITS_S else _unit(first, is_bailian)
    builder = TraceBuilder(tokens, options.coarsen)
    has_outputs = True
    for line in chain([first], lines):
        fields = line.json()
        if not isinstance(fields, dict):
            line.refuse("no JSON object; every line of this trace is a request")
        ids = line.ids(fields.get("hash_ids"), "hash_ids")
        line.check_room(len(ids), builder)
        if "input_length" not in fields and not options.block_tokens:
            line.refuse("input_length is missing: say how many tokens an id has (--block-tokens)")
        has_outputs &= "output_length" in fields
        builder.add(
            line.number_of(fields, "timestamp") * UNITS_S[unit],
            chained(ids, file_number + 1),
            line.count_of(fields, "input_length") if "input_length" in fields else 0,
            line.count_of(fields, "output_length") if "output_length" in fields else 0,
        )
    notes = [] if has_outputs else ["The trace does not say how long all answers were."]
    trace = builder.build(notes)
    if options.time_unit not in UNITS_S:
        check_rate(first.path, trace, unit)
    doubt = check_block_tokens(first.path, trace, options)
    return replace(trace, notes=(*trace.notes, doubt)) if doubt else trace


def _unit(first: TraceLine, is_bailian: bool) -> str:
    """Return the unit of times, from a first time since 1970, otherwise the format's default."""
    fields = first.json()
    time = first.number_of(fields, "timestamp")
    if time >= SINCE_1970_S:
        return "ms" if time >= SINCE_1970_MS else "s"
    return "s" if is_bailian else "ms"
