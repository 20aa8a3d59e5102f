"""Traces of every format, damaged, packed and packed bombs: a trace or one sentence."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.traces import read_traces
from kvtier.tools.replay.traces.recorded import write_trace
from tests.fuzz.mutations import damage, mutate
from tests.tools.replay.samples import OPTIONS, REQUESTS, bailian, mooncake, recording, session

OUTCOMES = frozenset({"read", "refused"})
CPU_S = 20.0
"""Bombs of empty lines are read up to their bounds."""
LINES = (
    [mooncake(0, [1, 2]), mooncake(1000, [1, 3]), mooncake(2000, [1, 2, 4])],
    [bailian(0, [1, 2], 1), bailian(1, [1, 3], 2)],
    [session("a", REQUESTS), session("b", REQUESTS)],
    recording([1, 2], [1, 3], [1, 2, 5]),
)
HUGE = (1 << 20, 1 << 40, 1 << 63, 1e15)
"""Lengths that expand."""

BOMBS = [gzip.compress(each * (1 << 20)) for each in (b" ", b"\n", b"{}\n")]


def grow(value: object, rng: random.Random) -> object:
    """Replace numbers of a JSON value by large ones."""
    if isinstance(value, dict):
        return {name: grow(each, rng) for name, each in value.items()}
    if isinstance(value, list):
        return [grow(each, rng) for each in value]
    return rng.choice(HUGE) if isinstance(value, int) and rng.random() < 0.2 else value


def a_trace(rng: random.Random) -> bytes:
    lines = list(rng.choice(LINES))
    for _ in range(rng.choice((0, 1, 1, 3))):
        at = rng.randrange(len(lines))
        change = rng.choice((mutate, mutate, grow))
        lines[at] = json.dumps(change(json.loads(lines[at]), rng))
    lines *= rng.choice((1, 1, 1, 300))
    text = "\n".join(lines) + "\n"
    made = text.encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "surrogatepass")
    if rng.random() < 0.4:
        made = damage(made, rng)
    if rng.random() < 0.2:
        made = gzip.compress(made, 1)
        if rng.random() < 0.03:
            made += rng.choice(BOMBS) * 400
        if rng.random() < 0.5:
            made = damage(made, rng)
    return made


def attempt(rng: random.Random, folder: Path) -> str:
    path = folder / "trace"
    path.write_bytes(a_trace(rng))
    return check(path, rng)


def check(path: Path, rng: random.Random) -> str:
    """Read a file as ``kvtier replay`` and ``kvtier record`` do."""
    try:
        trace = read_traces([path], replace(OPTIONS, coarsen=rng.choice((1, 1, 3))))
    except ConfigError as error:
        if not (str(error) and str(error).isprintable()):
            raise ValueError("no sentence that can be printed") from error
        return "refused"
    assert np.isfinite(trace.times).all()
    assert (np.diff(trace.times) >= 0).all()
    assert find_segments(trace).length.sum() == trace.num_references
    if rng.random() < 0.2:
        written = path.with_name("written")
        write_trace(trace, "salt", written)
        assert read_traces([written], OPTIONS).num_references == trace.num_references
    return "read"
