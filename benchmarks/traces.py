"""Real traces of requests, as block keys: an hour of a chat service, and sessions of coding agents.

They lie in a folder as their releases have them, compressed by zstd:
``mooncake/conversation_trace.jsonl.zst`` and ``agentic/agentic_sessions.jsonl.zst``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512
FOLDER = "KVTIER_TRACES"
"""In the environment: where the traces are."""

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. times: seconds. chains: of each request the keys of its blocks,
    uint64 [num_blocks]; a key has the same keys before it wherever it stands."""

    name: str
    times: list[float]
    chains: list[Keys]

    @cached_property
    def num_refs(self) -> int:
        return sum(map(len, self.chains))

    @cached_property
    def num_unique(self) -> int:
        return len(np.unique(np.concatenate(self.chains)))


def default_folder() -> Path:
    """Beside the sources, unless the environment says otherwise."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[2] / "shared" / "traces")


def _lines(path: Path) -> Iterator[str]:
    with subprocess.Popen(["zstd", "-dcq", str(path)], stdout=subprocess.PIPE, text=True) as pipe:
        assert pipe.stdout is not None
        yield from pipe.stdout
    if pipe.returncode:
        raise SystemExit(f"{path}: zstd could not read it; is it there, and zstd installed?")


def conversation(folder: Path) -> Trace:
    """One hour of a chat service: requests of 12,000 tokens, most of them asked once."""
    rows = (json.loads(line) for line in _lines(folder / "mooncake/conversation_trace.jsonl.zst"))
    ordered = sorted(rows, key=lambda row: row["timestamp"])
    return Trace(
        "conversation",
        [row["timestamp"] / 1000 for row in ordered],
        [np.array(row["hash_ids"], np.uint64) for row in ordered],
    )


def agentic(folder: Path, num_sessions: int | None, hours: float, seed: int) -> Trace:
    """Coding agents: sessions of 118,000 tokens that begin at random times. Those with equal tools
    and system prompts share that prefix. num_sessions: None for all."""
    chance = random.Random(seed)
    sessions = [json.loads(line) for line in _lines(folder / "agentic/agentic_sessions.jsonl.zst")]
    chance.shuffle(sessions)
    requests: list[tuple[float, Keys]] = []
    prefixes: dict[tuple[int, int], int] = {}
    for number, session in enumerate(sessions[:num_sessions], start=1):
        start = chance.random() * hours * 3600
        stride = BLOCK_TOKENS // session["block_size"]
        prefix = (session["tool_tokens"], session["system_tokens"])
        num_shared = sum(prefix) // BLOCK_TOKENS
        shared = prefixes.setdefault(prefix, len(prefixes)) << 32 | 1 << 63
        last: dict[object, Keys] = {}
        for at, _, _, agent, keep, runs, *_ in session["requests"]:
            pieces = [last.get(agent, np.empty(0, np.uint64))[:keep]]
            for first, length in zip(runs[::2], runs[1::2], strict=True):
                pieces.append(np.arange(first, first + length, dtype=np.uint64))
            blocks = last[agent] = np.concatenate(pieces)
            chain = blocks[stride - 1 :: stride] | np.uint64(number << 32)
            if agent == 0:
                places = np.arange(min(num_shared, len(chain)), dtype=np.uint64)
                chain[: len(places)] = places | np.uint64(shared)
            if len(chain):
                requests.append((start + at, chain))
    requests.sort(key=lambda request: request[0])
    name = f"agentic, {len(sessions[:num_sessions])} sessions"
    return Trace(name, [at for at, _ in requests], [chain for _, chain in requests])
