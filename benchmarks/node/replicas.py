"""M1 with real engines: two vLLM replicas behind random routing, over one node or each by itself.

    python -m benchmarks.node --parts replicas

Requests go to one replica at a time, since a machine of two cores can't run more at once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.engines.model import KV_BYTES_PER_TOKEN, make_model
from benchmarks.engines.requests import in_turn, tokens
from benchmarks.engines.run import started
from benchmarks.engines.servers import Contestant, Server, Size
from benchmarks.node.part import JsonRow, Part
from benchmarks.node.processes import running_node
from benchmarks.report.targets import judged
from benchmarks.vllm.servers import BLOCK, with_kvtier
from kvtier.tools.report.stats import median_with_interval

NUM_REPLICAS = 2
NODE, APART = "one node", "a cache in each"
NUM_CONVERSATIONS = 16
NUM_TURNS = 5
OPENING_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1500, 130, 4
DEVICE_BLOCKS = 40
"""Device memory of a replica: little more than one request."""
HOST_BYTES = (
    NUM_CONVERSATIONS * (OPENING_TOKENS + NUM_TURNS * TURN_TOKENS) * KV_BYTES_PER_TOKEN * 9 // 10
)
"""Memory of all replicas together, for nine tenths of the conversations."""
SEGMENT_BYTES = 8 * BLOCK * KV_BYTES_PER_TOKEN
LEAST_RATIO, MAX_TTFT = 1.8, 0.6


class Answered(NamedTuple):
    """Outcome of one request."""

    found: int
    ttft_ms: float
    texts: tuple[str, ...]


def replica(way: str, node: Path) -> Contestant:
    """Return what each replica is. node: socket of the node."""
    if way == APART:
        return with_kvtier(str(HOST_BYTES // NUM_REPLICAS), APART)
    return with_kvtier(None, NODE, node=str(node), node_deadline_s=1.0)


def conversations(seed: int) -> list[tuple[int, list[int]]]:
    """Return requests in order: a replica and a prompt. Each turn repeats the turns before it."""
    rng = random.Random(seed)
    texts = {
        each: tokens(1000 * seed + each, OPENING_TOKENS + NUM_TURNS * TURN_TOKENS)
        for each in range(NUM_CONVERSATIONS)
    }
    asked: list[tuple[int, list[int]]] = []
    for turn in range(NUM_TURNS):
        for each in rng.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS):
            prompt = texts[each][: OPENING_TOKENS + (turn + 1) * TURN_TOKENS]
            asked.append((rng.randrange(NUM_REPLICAS), prompt))
    return asked


def ask(servers: Sequence[Server], requests: Sequence[tuple[int, list[int]]]) -> list[Answered]:
    """Send all requests, one after the other."""
    found = []
    for replica, prompt in requests:
        answer = servers[replica].ask(prompt, ANSWER_TOKENS, logprobs=1)
        found.append(Answered(answer.cached_tokens, answer.ttft_ms, answer.texts))
    return found


def measure(quick: bool) -> Part:
    """Send the same conversations to both pairs of replicas, in turn."""
    num_rounds = 1 if quick else 5
    of: dict[str, list[list[Answered]]] = {}
    with TemporaryDirectory(prefix="kvtier-replicas-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model")
        node = stack.enter_context(running_node(HOST_BYTES, SEGMENT_BYTES))
        pairs: dict[str, list[Server]] = {}
        for way in (NODE, APART):
            made = [replica(way, node.config.socket)] * NUM_REPLICAS
            own = folder / way.replace(" ", "-")
            pairs[way] = stack.enter_context(started(made, model, own, Size(DEVICE_BLOCKS)))
            of[way] = []
            for server in pairs[way]:  # all replicas attach before anything is timed
                server.ask(tokens(7, BLOCK + 1), 1)
                server.settle()
        for number in range(num_rounds):
            requests = conversations(number + 1)
            for way in in_turn(list(pairs), number):
                of[way].append(ask(pairs[way], requests))
                print(f"round {number}, {way}: {_mean_ms(of[way][-1]):.0f} ms", file=sys.stderr)
    return Part([_row(way, rounds) for way, rounds in of.items()], _targets(of))


def _mean_ms(answers: Sequence[Answered]) -> float:
    return sum(answer.ttft_ms for answer in answers) / len(answers)


def _found(answers: Sequence[Answered]) -> int:
    return sum(answer.found for answer in answers)


def _row(way: str, rounds: Sequence[Sequence[Answered]]) -> JsonRow:
    return {
        "way": way,
        "requests": sum(map(len, rounds)),
        "prompt tokens found": sum(map(_found, rounds)),
        "mean TTFT ms": median_with_interval([_mean_ms(each) for each in rounds]).value,
    }


def _targets(of: dict[str, list[list[Answered]]]) -> list[dict[str, object]]:
    """Return M1. Raises AssertionError if answers of the two ways differ."""
    for one, other in zip(of[NODE], of[APART], strict=True):
        num = sum(a.texts != b.texts for a, b in zip(one, other, strict=True))
        if num:
            raise AssertionError(f"{num} of {len(one)} answers differ between the two ways")
    pairs = list(zip(of[NODE], of[APART], strict=True))
    more = median_with_interval([_found(a) / max(1, _found(b)) for a, b in pairs])
    time = median_with_interval([_mean_ms(a) / _mean_ms(b) for a, b in pairs])
    facts = {"engines": NUM_REPLICAS, "against": APART}
    return [
        judged("M1", more, LEAST_RATIO, at_least=True, of="prompt tokens found", **facts),
        judged("M1", time, MAX_TTFT, at_least=False, of="mean TTFT", **facts),
    ]
