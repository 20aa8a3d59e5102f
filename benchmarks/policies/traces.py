"""Traces of real requests, as block keys: an hour of a chat service, sessions of coding agents.

They lie in a folder as their releases have them, compressed by zstd:
``mooncake/conversation_trace.jsonl.zst`` and ``agentic/agentic_sessions.jsonl.zst``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import Chains
from kvtier.tools.replay.traces import ReadOptions, read_traces

BLOCK_TOKENS = 512
SESSION_BLOCK_TOKENS = 64
FOLDER = "KVTIER_TRACES"
"""Environment variable with the folder of the traces."""

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    times: list[float]
    """Arrival times in seconds."""
    chains: list[Keys]
    """Block keys of each request, uint64 [num_blocks]. Equal keys have equal keys before them."""

    @cached_property
    def num_refs(self) -> int:
        return sum(map(len, self.chains))

    @cached_property
    def num_unique(self) -> int:
        return len(np.unique(np.concatenate(self.chains)))


def default_folder() -> Path:
    """Return the folder that the environment names, or one beside the sources."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[3] / "shared" / "traces")


def conversation(folder: Path) -> Trace:
    """Return one hour of a chat service: requests of 12,000 tokens, most of them sent once."""
    path = folder / "mooncake/conversation_trace.jsonl.zst"
    return _read("conversation", path, ReadOptions(_NO_TOKENS, block_tokens=BLOCK_TOKENS))


def agentic(folder: Path, num_sessions: int | None, hours: float, seed: int) -> Trace:
    """Return sessions of coding agents, of 118,000 tokens, that begin at random times.

    Sessions with equal tools and system prompts share that prefix.

    Args:
        folder: of the traces.
        num_sessions: None for all.
        hours: within which the sessions begin.
        seed: of the start times.
    """
    options = ReadOptions(
        _NO_TOKENS,
        coarsen=BLOCK_TOKENS // SESSION_BLOCK_TOKENS,
        sessions=num_sessions or 0,
        hours=hours,
        seed=seed,
    )
    name = f"agentic, {num_sessions or 'all'} sessions"
    return _read(name, folder / "agentic/agentic_sessions.jsonl.zst", options)


_NO_TOKENS = Chains(bytes(32), BLOCK_TOKENS)
"""Both traces have hashes instead of tokens."""


def _read(name: str, path: Path, options: ReadOptions) -> Trace:
    try:
        trace = read_traces([path], options)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    chains = np.split(trace.keys, trace.offsets[1:-1])
    asked = [at for at, chain in enumerate(chains) if len(chain)]
    return Trace(name, trace.times[asked].tolist(), [chains[at] for at in asked])
