"""Traces with block ids: of Mooncake, and of Qwen on Bailian.

Mooncake: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens each.
Bailian: also ``chat_id``, ``parent_chat_id``, ``type``, ``turn``; ``timestamp`` in seconds, 16
tokens per id. A partial last block counts as a block. Other tools write such traces in other units,
so the whole trace is checked against ``input_length`` and time. Some write sessions: they have
``session_id``, and instead of a ``timestamp`` the ``delay`` since the session's last answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtier.tools.replay.trace import Trace, TraceBuilder, chained
from kvtier.tools.replay.traces.lines import TraceLine
from kvtier.tools.replay.traces.plausible import check_block_tokens, check_rate

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions

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
    times = _Times(options, UNITS_S[unit])
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
            times.of(line, fields),
            chained(ids, file_number + 1),
            line.count_of(fields, "input_length") if "input_length" in fields else 0,
            line.count_of(fields, "output_length") if "output_length" in fields else 0,
        )
    notes = [] if has_outputs else ["The trace does not say how long all answers were."]
    trace = builder.build([*notes, *times.notes()])
    if options.time_unit not in UNITS_S:
        check_rate(first.path, trace, unit)
    doubt = check_block_tokens(first.path, trace, options)
    return replace(trace, notes=(*trace.notes, doubt)) if doubt else trace


class _Times:
    """Times of requests, some of which have a delay within their session instead.

    unit_s: seconds of the trace's unit of time.
    """

    def __init__(self, options: ReadOptions, unit_s: float) -> None:
        self._options = options
        self._unit_s = unit_s
        self._chance = random.Random(options.seed)
        self._last_s: dict[str, float] = {}  # by session
        self._num_drawn = self._num_delayed = 0

    def of(self, line: TraceLine, fields: dict[str, Any]) -> float:
        """Return the time of a request, in seconds."""
        session = fields.get("session_id")
        last_s = None if session is None else self._last_s.get(str(session))
        if fields.get("timestamp") is not None:
            time_s = line.number_of(fields, "timestamp") * self._unit_s
        elif last_s is not None and fields.get("delay") is not None:
            self._num_delayed += 1
            time_s = last_s + line.number_of(fields, "delay") * self._unit_s
        elif last_s is None and session is not None:
            self._num_drawn += 1
            time_s = self._chance.random() * self._options.hours * 3600
        elif session is not None:
            line.refuse("timestamp and delay are missing: one says when this request came")
        else:
            line.refuse("timestamp is missing, and there is no session_id with a delay either")
        if session is not None:
            self._last_s[str(session)] = time_s
        return time_s

    def notes(self) -> Iterator[str]:
        """Yield what was assumed."""
        if self._num_delayed:
            yield (
                f"{self._num_delayed} requests have a delay since the last answer of their "
                "session, and no time: the answers were taken to need none."
            )
        if self._num_drawn:
            yield (
                f"{self._num_drawn} sessions have no start of their own: they were begun at random "
                f"within {self._options.hours:g} h (seed {self._options.seed})."
            )


def _unit(first: TraceLine, is_bailian: bool) -> str:
    """Return the unit of times, from a first time since 1970, otherwise the format's default."""
    fields = first.json()
    if fields.get("timestamp") is None:
        return "s" if is_bailian else "ms"
    time = first.number_of(fields, "timestamp")
    if time >= SINCE_1970_S:
        return "ms" if time >= SINCE_1970_MS else "s"
    return "s" if is_bailian else "ms"
