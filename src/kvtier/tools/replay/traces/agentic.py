"""Sessions of agents, one per line, each request encoded relative to the one before.

``id``, ``block_size``, ``tool_tokens``, ``system_tokens``, ``requests``: a list of ``[seconds,
input tokens, output tokens, agent, keep, runs, ...]``. A request's ids are the first ``keep`` of
the same agent's last request, followed by ``runs`` = [start, length, start, length, ...]. Ids are
valid within their session only, and sessions have no start time. Both are assumed here, and
reported in a note.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import ConfigError
from kvtier.tools.replay.trace import BLOCKS_PER_REQUEST, Trace, TraceBuilder, chained, mixed
from kvtier.tools.replay.traces.lines import TraceLine, check_counts

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions

NAME = "agentic sessions"
NO_SESSION = "no session; every line of this trace is an object with requests"


def recognises(line: TraceLine) -> bool:
    begin = line.text[:4096]
    if not begin.lstrip().startswith("{") or '"requests"' not in line.text:
        return False
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and bool({"id", "block_size"} & fields.keys())


def read(lines: Iterator[TraceLine], options: ReadOptions, file_number: int) -> Trace:
    chance = random.Random(options.seed)
    first = next(lines)
    block_tokens = first.block_tokens_of(_object(first), "block_size")
    builder = TraceBuilder(block_tokens, options.coarsen)
    pool = [first]
    for line in lines:
        if '"requests"' not in line.text:
            line.refuse(NO_SESSION)
        line.check_room(BLOCKS_PER_REQUEST * len(pool), builder)
        pool.append(line)
    chance.shuffle(pool)
    chosen = pool[: options.sessions or None]
    for number, line in enumerate(chosen):
        start_s = chance.random() * options.hours * 3600
        session = _object(line)
        if session.get("block_size") != block_tokens:
            line.refuse(f"block_size is not {block_tokens}, as that of other sessions")
        _add(builder, line, session, start_s, number + 1 + (file_number << 32), options)
    prefixes = "those with equal lengths of tools and system prompt share these"
    if not options.shared_prefix:
        prefixes = "none shares anything with another"
    note = (
        f"The {len(chosen)} sessions have no start of their own: they were begun at random within "
        f"{options.hours:g} h (seed {options.seed}); {prefixes}."
    )
    return builder.build([note])


def _add(
    builder: TraceBuilder,
    line: TraceLine,
    session: dict[str, Any],
    start_s: float,
    number: int,
    options: ReadOptions,
) -> None:
    """Add a session's requests. number: distinguishes its ids from other sessions'."""
    prefix_tokens = [line.count_of(session, name) for name in ("tool_tokens", "system_tokens")]
    num_shared = sum(prefix_tokens) // builder.block_tokens if options.shared_prefix else 0
    # Ids of shared tools and system prompts are made from their lengths.
    shared = mixed(mixed(np.array(prefix_tokens[:1], np.uint64)) ^ np.uint64(prefix_tokens[1]))[0]
    own = mixed(np.array([number], np.uint64))[0]
    last: dict[int, npt.NDArray[np.uint64]] = {}
    requests = session["requests"]
    if not isinstance(requests, list):
        line.refuse("requests should be a list")
    for at, request in enumerate(requests):
        try:
            time_s, input_tokens, output_tokens, agent, keep, runs = request[:6]
            line.check_room(_num_blocks(int(keep), runs), builder)
            ids = np.concatenate([last.get(agent, _NONE)[: int(keep)], *_expanded(runs)])
            time_s = start_s + float(time_s)
            input_tokens, output_tokens = int(input_tokens), int(output_tokens)
            check_counts(keep, input_tokens, output_tokens, abs(time_s))
        except ConfigError:
            raise
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            line.refuse(f"request {at} can't be read: {error}")
        last[agent] = ids
        keys = np.where(
            (np.arange(len(ids)) < num_shared) & (agent == 0),
            shared + np.arange(len(ids), dtype=np.uint64),
            own ^ ids,
        )
        builder.add(time_s, chained(keys), input_tokens, output_tokens)


_NONE = np.zeros(0, np.uint64)


def _num_blocks(keep: int, runs: list[int]) -> int:
    """Return an upper bound of a request's blocks, before they are expanded."""
    if len(runs) % 2 or not all(type(run) is int and run >= 0 for run in runs):
        raise ValueError("its runs are no pairs of start and length")
    return keep + sum(runs[1::2])


def _expanded(runs: list[int]) -> list[npt.NDArray[np.uint64]]:
    return [
        np.arange(start, start + length, dtype=np.uint64)
        for start, length in zip(runs[::2], runs[1::2], strict=True)
    ]


def _object(line: TraceLine) -> dict[str, Any]:
    fields = line.json()
    if not isinstance(fields, dict) or "requests" not in fields:
        line.refuse(NO_SESSION)
    return fields
