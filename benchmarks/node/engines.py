"""M3 and M4 with real engines: a vLLM that is killed, and a node that is killed and stopped.

    python -m benchmarks.node --parts engines

Compares a vLLM over a node with one without a cache, on the CPU. They get one request at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.engines.model import KV_BYTES_PER_TOKEN, make_model
from benchmarks.engines.requests import in_turn, tokens
from benchmarks.engines.run import started
from benchmarks.engines.servers import Contestant, Server, Size
from benchmarks.node.part import Part
from benchmarks.node.processes import Node, running_node
from benchmarks.report.targets import judged
from benchmarks.vllm.servers import BLOCK, VLLM, vllm_alone, with_kvtier
from kvtier.tools.report.stats import median_with_interval, percentile_ratio

OVER_NODE, ALONE = "over the node", VLLM
PROMPT_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 2000, 500, 4
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
SIZE = Size(40)
HOST_BYTES = 128 * BLOCK * KV_BYTES_PER_TOKEN
SEGMENT_BYTES = 8 * BLOCK * KV_BYTES_PER_TOKEN
MAX_AFTER_START, MAX_P99 = 1.05, 1.1
LEAST_FOR_P99 = 100
"""Least number of requests for an interval of the p99."""


def measure(quick: bool) -> Part:
    """Kill and restart the engine. Then kill and stop the node while new prompts are sent."""
    num_kills, num_new = (1, 8) if quick else (5, 120)
    with TemporaryDirectory(prefix="kvtier-engines-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model")
        node = stack.enter_context(running_node(HOST_BYTES, SEGMENT_BYTES))
        engine = with_kvtier(None, OVER_NODE, node=str(node.config.socket))
        restarts = [
            _restart(engine, model, folder / f"restart{number}", number)
            for number in range(num_kills)
        ]
        asked = stack.enter_context(started((engine, vllm_alone()), model, folder / "outage", SIZE))
        times = _outage(node, asked, num_new)
    after = median_with_interval([later / before for before, later in restarts])
    pairs = list(zip(times[OVER_NODE], times[ALONE], strict=True))
    slow = percentile_ratio(pairs, 99, LEAST_FOR_P99)
    over_node, alone = np.percentile(pairs, 99, axis=0).tolist()
    rows = [
        {
            "case": "engine killed and started again",
            "requests": num_kills,
            "TTFT ms before": median_with_interval([before for before, _ in restarts]).value,
            "TTFT ms after": median_with_interval([later for _, later in restarts]).value,
        },
        {
            "case": "node killed, started, stopped, resumed; p99",
            "requests": num_new,
            "TTFT ms before": alone,
            "TTFT ms after": over_node,
        },
    ]
    targets = [
        judged("M3", after, MAX_AFTER_START, at_least=False, of="first TTFT after a restart"),
        judged("M4", slow, MAX_P99, at_least=False, of="p99"),
    ]
    return Part(rows, targets)


def _restart(engine: Contestant, model: Path, folder: Path, number: int) -> tuple[float, float]:
    """Return the TTFT of a prompt in the node's memory, before the engine is killed and after.

    Raises RuntimeError if it is not found there.
    """
    prompt = tokens(100 + number, PROMPT_TOKENS)
    with started([engine], model, folder / "first", SIZE) as (server,):
        server.ask(prompt, ANSWER_TOKENS)
        server.settle()
        before = _hit_ms(server, prompt)
        server.kill()
    with started([engine], model, folder / "second", SIZE) as (server,):
        after = _hit_ms(server, prompt)
    print(f"restart {number}: {before:.0f} ms, {after:.0f} ms", file=sys.stderr)
    return before, after


def _hit_ms(server: Server, prompt: list[int]) -> float:
    """Return the TTFT of a prompt that only the node has."""
    server.ask(tokens(7, BLOCK // 2), ANSWER_TOKENS)  # too short for a block: wakes the engine
    server.reset()
    answer = server.ask(prompt, ANSWER_TOKENS)
    if answer.cached_tokens < PROMPT_BLOCKS * BLOCK:
        raise RuntimeError(f"{answer.cached_tokens} of {PROMPT_BLOCKS * BLOCK} tokens were found")
    return answer.ttft_ms


def _outage(node: Node, servers: Sequence[Server], num_new: int) -> dict[str, list[float]]:
    """Return the TTFTs of new prompts, while the node is killed, started, stopped and resumed."""
    steps = [
        node.kill,
        node.start,
        node.pause,
        node.resume,
    ]
    times: dict[str, list[float]] = {server.contestant.name: [] for server in servers}
    for server in servers:
        server.ask(tokens(8, NEW_TOKENS), ANSWER_TOKENS)
        server.settle()
    for number in range(num_new):
        if not number * len(steps) % num_new:
            steps[number * len(steps) // num_new]()
        prompt = tokens(10_000 + number, NEW_TOKENS)
        for server in in_turn(servers, number):
            times[server.contestant.name].append(server.ask(prompt, ANSWER_TOKENS).ttft_ms)
    return times
