"""Traces whose requests name their blocks: of Mooncake, and of Qwen on Bailian.

Mooncake: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens each.
Bailian: the same and ``chat_id``, ``parent_chat_id``, ``type``, ``turn``; ``timestamp`` in seconds,
16 tokens each. The last block of a request may be a part of one; it counts as a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtier.replay.trace import Trace, TraceBuilder, chained
from kvtier.replay.traces.lines import Line

if TYPE_CHECKING:
    from kvtier.replay.traces.options import ReadOptions

NAME = "Mooncake, Bailian"
FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16


def recognises(line: Line) -> bool:
    if not line.text.lstrip().startswith("{"):
        return False
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.keys() >= FIELDS


def read(lines: Iterator[Line], options: ReadOptions, file_number: int) -> Trace:
    first = next(lines)
    is_bailian = '"chat_id"' in first.text
    tokens = options.block_tokens or (BAILIAN_TOKENS if is_bailian else MOONCAKE_TOKENS)
    builder = TraceBuilder(tokens, options.coarsen)
    unit_s = 1.0 if is_bailian else 1e-3
    line: Line | None = first
    while line is not None:
        fields = line.json()
        if not isinstance(fields, dict):
            line.refuse("no JSON object; every line of this trace is a request")
        ids = line.ids(fields.get("hash_ids"), "hash_ids")
        line.check_room(len(ids), builder)
        builder.add(
            line.number_of(fields, "timestamp") * unit_s,
            chained(ids, file_number + 1),
            line.count_of(fields, "input_length"),
            line.count_of(fields, "output_length"),
        )
        line = next(lines, None)
    return builder.build()
