"""Logs of containers and of journald, whose long lines are in pieces: a trace or one sentence.

Records of containerd and Docker, undamaged, give what the lines in them give.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.tools.replay.traces import read_traces
from tests.fuzz.mutations import damage
from tests.fuzz.targets.logs import a_line
from tests.fuzz.targets.traces import check
from tests.tools.replay.samples import OPTIONS, SGLANG, SGLANG_JSON, VLLM
from tests.tools.replay.test_traces import cri, docker, journal

OUTCOMES = frozenset({"read", "refused"})
CUTTERS: tuple[Callable[..., list[str]], ...] = (cri, docker, journal)


def tokens(path: Path) -> list[int] | None:
    """Return the number of tokens of each request; None if the log is refused."""
    try:
        return list(map(int, read_traces([path], OPTIONS).input_tokens))
    except ConfigError:
        return None


def attempt(rng: random.Random, folder: Path) -> str:
    lines = [rng.choice((*VLLM, *SGLANG, *SGLANG_JSON)) for _ in range(rng.randrange(4))]
    lines += [a_line(rng).replace("\n", " ") for _ in range(rng.randrange(1, 6))]
    rng.shuffle(lines)
    cut, size = rng.choice(CUTTERS), rng.choice((60, 1000, 16384, 20480, 48 << 10))
    records = [record for line in lines for record in cut(line, size)]
    path, plain = folder / "server.log", folder / "plain.log"
    made = ("\n".join(records) + "\n").encode()
    path.write_bytes(made)
    if cut is not journal and rng.random() < 0.5:
        stamped = [record for line in lines for record in cut(line, 1 << 30)]
        plain.write_text("\n".join(stamped) + "\n")
        assert tokens(path) == tokens(plain)
    if rng.random() < 0.6:
        dice = rng.random()
        if dice < 0.3:
            rng.shuffle(records)
            made = ("\n".join(records) + "\n").encode()
        elif dice < 0.4:
            made = b"\0" * rng.choice((1, 5000, 40 << 20)) + made
        else:
            made = damage(made, rng)
        path.write_bytes(made)
    return check(path, rng)
