"""vLLM's own multi-turn benchmark: the script from its source archive, its input and its output."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.servers import SERVED_AS, Server
from benchmarks.peers import ENVIRONMENTS
from benchmarks.vllm.fetch import FOLDER
from benchmarks.vllm.servers import QUIET
from kvtier.tools.report.stats import summarize

SCRIPT = FOLDER / "benchmark_serving_multi_turn.py"
PYTHON = ENVIRONMENTS / "vllm" / "bin" / "python"
TEXT = "words.txt"
LIMIT_S = 900.0

NUM_WORDS = 24_000
SYLLABLES = [a + b for a in ("b", "dr", "f", "gl", "k", "m", "p", "st", "v") for b in "aeiou"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of the script. Lengths are ranges in tokens."""

    num_conversations: int = 8
    num_active: int = 6
    """Conversations in progress. A client begins a new one when one ends, until none is left."""
    turns: tuple[int, int] = (12, 16)
    """Questions and answers, each counted."""
    shared_tokens: int = 256
    """Text at the beginning that all conversations have in common."""
    opening_tokens: tuple[int, int] = (1000, 1600)
    """Text of one conversation only, before its first question."""
    question_tokens: tuple[int, int] = (80, 120)
    answer_tokens: tuple[int, int] = (24, 40)
    num_clients: int = 2

    def config(self) -> dict[str, object]:
        """Return the script's input file."""

        def between(ends: tuple[int, int]) -> dict[str, object]:
            return {"distribution": "uniform", "min": ends[0], "max": ends[1]}

        return {
            "filetype": "generate_conversations",
            "num_conversations": self.num_conversations,
            "text_files": [TEXT],
            "print_stats": False,
            "prompt_input": {
                "num_turns": between(self.turns),
                "common_prefix_num_tokens": {
                    "distribution": "constant",
                    "value": self.shared_tokens,
                },
                "prefix_num_tokens": between(self.opening_tokens),
                "num_tokens": between(self.question_tokens),
            },
            "prompt_output": {"num_tokens": between(self.answer_tokens)},
        }


def words(seed: int, num_words: int = NUM_WORDS) -> str:
    """Return text that is the same on every machine and shares nothing with that of other seeds."""
    rng = random.Random(seed)
    lexicon = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(2000)]
    lines = []
    for _ in range(num_words // 12):
        line = " ".join(rng.choices(lexicon, k=12))
        lines.append(line.capitalize() + ".")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the script."""

    conversation: str
    number: int
    """Number of the question within its conversation, from 0."""
    ttft_ms: float
    tpot_ms: float
    latency_ms: float
    start_ms: float
    input_tokens: int
    output_tokens: int


def read_turns(stats: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns in the content of ``--stats-json-output``."""
    return [
        Turn(
            stat["conversation_id"],
            stat["input_num_turns"] // 2,
            stat["ttft_ms"],
            stat["tpot_ms"],
            stat["latency_ms"],
            stat["start_time_ms"],
            stat["input_num_tokens"],
            stat["output_num_tokens"],
        )
        for stat in stats
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the script."""

    turns: tuple[Turn, ...]
    answers: Mapping[str, str]
    """Digest of the answers of each completed conversation."""
    prompt_tokens: int
    cached_tokens: int
    """Cached tokens of all prompts, as the engine counts them."""
    from_tier_tokens: int
    """Cached tokens that were not in the engine's own pool."""
    num_requests: int
    cpu_s: float
    """CPU seconds of the server's processes."""

    @property
    def ttft_ms(self) -> float:
        """Mean over all turns, including first ones, as the script reports it."""
        return mean([turn.ttft_ms for turn in self.turns])

    @property
    def later_ttft_ms(self) -> float:
        """Mean over all turns except the first ones."""
        return mean([turn.ttft_ms for turn in self.turns if turn.number])

    @property
    def tpot_ms(self) -> float:
        return mean([turn.tpot_ms for turn in self.turns])

    @property
    def seconds(self) -> float:
        """Time from the first request to the last answer."""
        begin = min(turn.start_ms for turn in self.turns)
        return (max(turn.start_ms + turn.latency_ms for turn in self.turns) - begin) / 1000

    @property
    def requests_per_s(self) -> float:
        return len(self.turns) / self.seconds


def mean(values: Sequence[float]) -> float:
    found = summarize(values)
    assert found is not None, "there was at least one request"
    return found.mean


def run_script(server: Server, workload: Workload, seed: int, model: Path, folder: Path) -> Run:
    """Run all conversations against a server. The client runs in vLLM's environment.

    Raises RuntimeError if the script or a request failed.
    """
    folder.mkdir(parents=True)
    (folder / TEXT).write_text(words(seed), encoding="utf-8")
    (folder / "input.json").write_text(json.dumps(workload.config()), encoding="utf-8")
    before, cpu_s = server.tokens(), server.cpu_s()
    arguments: dict[str, object] = {
        "--input-file": "input.json",
        "--stats-json-output": "stats.json",
        "--output-file": "output.json",
        "--model": model,
        "--served-model-name": SERVED_AS,
        "--url": server.url,
        "--seed": seed,
        "--num-clients": workload.num_clients,
        "--max-active-conversations": workload.num_active,
        "--no-early-stop": None,
    }
    done = subprocess.run(
        [PYTHON, SCRIPT]
        + [str(word) for pair in arguments.items() for word in pair if word is not None],
        cwd=folder,
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{SCRIPT.name}: {(done.stderr.strip() or done.stdout)[-400:]}")
    turns = read_turns(json.loads((folder / "stats.json").read_text()))
    conversations = json.loads((folder / "output.json").read_text())
    if failed := num_failures(done.stderr):
        raise RuntimeError(f"{SCRIPT.name}: {failed} requests failed: {done.stderr[-400:]}")
    counted, cpu_s = server.tokens().since(before), server.cpu_s() - cpu_s
    return Run(
        turns=tuple(turns),
        answers={
            conversation["id"]: digest(conversation["messages"]) for conversation in conversations
        },
        prompt_tokens=int(counted.prompt),
        cached_tokens=int(counted.cached),
        from_tier_tokens=int(counted.from_tier),
        num_requests=len(turns),
        cpu_s=cpu_s,
    )


def num_failures(log: str) -> int:
    """Return the number of failed requests, from the clients' last log lines."""
    found = re.findall(r"num_successes=\d+, num_failures=(\d+)", log)
    if not found:
        raise RuntimeError(f"{SCRIPT.name}: no client came to its end: {log[-400:]}")
    return sum(map(int, found))


def in_both(first: Run, second: Run) -> tuple[Run, Run]:
    """Return both runs with the turns that both have.

    Where a run stops depends on which client is faster.
    """
    both = {(turn.conversation, turn.number) for turn in first.turns} & {
        (turn.conversation, turn.number) for turn in second.turns
    }
    kept = [
        replace(run, turns=tuple(e for e in run.turns if (e.conversation, e.number) in both))
        for run in (first, second)
    ]
    return kept[0], kept[1]


def digest(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the digest of a conversation's answers."""
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return hashlib.sha256("\0".join(answers).encode()).hexdigest()[:16]
