"""Requests of SGLang, recorded and replayed: over its own tree, and by a real server."""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import requests
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvtier.connectors.sglang.shared.prefill import SCHEDULER, WATCH
from kvtier.index.policies.replayed import LRU
from kvtier.observe.recording import Chains
from kvtier.tools.replay.policies import Replayer
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from tests.engines.sglang.servers import PAGE as SERVER_PAGE
from tests.engines.sglang.servers import linker, server, storage
from tests.engines.sglang.servers import prompt as tokens_of
from tests.engines.sglang.trees import FULL, PAGE, Tree

KEY = 64
"""Tokens per key of a recording; pages of the tree are smaller."""
PAGE_BYTES = 2 * FULL.num_layers * PAGE * FULL.head_num * FULL.head_dim * 2


def _read(path: Path) -> Trace:
    return read_traces([path], ReadOptions(Chains(b"s" * 32, 64)))


def _replayed(trace: Trace, capacity: int) -> list[int]:
    """Return the number of tokens that each request finds under LRU. capacity: number of keys."""
    found = Replayer(trace, find_segments(trace)).hits(LRU, capacity).found
    tokens: list[int] = (found * trace.block_tokens).tolist()
    return tokens


def _traffic(num_requests: int, unit: int, most: int, rest: int = 0) -> list[list[int]]:
    """Return growing conversations, in turns of ``unit`` tokens, each with ``rest`` tokens more."""
    rng = random.Random(3)
    histories = [tokens_of(seed, unit) for seed in range(8)]
    asked = []
    for number in range(num_requests):
        at = rng.randrange(len(histories))
        if len(histories[at]) >= most * unit:
            histories[at] = tokens_of(1000 + number, unit)
        histories[at] = histories[at] + tokens_of(100 + number, rng.randint(1, 2) * unit)
        asked.append(histories[at] + tokens_of(5000 + number, rest))
    return asked


def _end(tokens: Sequence[int], num_output: int) -> None:
    """Let SGLang's scheduler process the step in which a request ends."""
    req = Req("r", "", array("q", tokens), SamplingParams(max_new_tokens=num_output))
    batch: Any = SimpleNamespace(reqs=[req])

    def process(*_: object) -> None:
        req.output_ids.extend([0] * num_output)
        req.finished_reason = FINISH_LENGTH(length=num_output)

    WATCH.hooks()[f"{SCHEDULER}.process_batch_result"](process, None, batch, object())


def _check_times(path: Path, began: float) -> None:
    """Check the times of a recording. began: ``time.monotonic`` before it."""
    _, *rows = path.read_text().splitlines()
    times = [json.loads(row)[0] for row in rows]
    assert 0 <= min(times) < max(times) < time.monotonic() - began


def test_a_recording_replays_to_the_hits_of_sglangs_tree(tmp_path: Path) -> None:
    path, began = tmp_path / "trace", time.monotonic()
    room = 24 * KEY // PAGE
    tree = Tree(FULL, host_capacity=room * PAGE_BYTES, record=str(path), eviction_policy="lru")
    tree.fill(0)
    asked, hits = _traffic(40, KEY, most=6), []
    for number, tokens in enumerate(asked):
        req, found = tree.find(f"r{number}", tokens)
        if found:
            assert tree.load(req) is not None
        hits.append(found)
        tree.compute(tokens)
        tree.settle()
        tree.flush()
        _end(tokens, number % 3)
    assert tree.linker._linked["kv"].cache.ladder.usage()["host"].num_slots == room
    tree.close()
    trace = _read(path)
    _check_times(path, began)
    assert trace.block_tokens == KEY
    assert trace.input_tokens.tolist() == [len(each) for each in asked]
    assert trace.output_tokens.tolist() == [number % 3 for number in range(40)]
    assert _replayed(trace, room * PAGE // KEY) == hits
    assert 0 < sum(hits) < sum(_replayed(trace, 1000))


def test_tree_with_a_file_that_cant_be_written_serves_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(FULL, record=str(tmp_path))
    tree.fill(0)
    assert [message for message in caplog.messages if "recording" in message] == [
        f"kvtier serves without a recording: record: can't write {tmp_path}: Is a directory"
    ]
    tree.compute(tokens_of(1, 4 * PAGE))
    tree.settle()
    tree.flush()
    _end(tokens_of(1, 4 * PAGE), 1)
    assert tree.find("r", tokens_of(1, 4 * PAGE))[1] == 4 * PAGE
    tree.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["linker", "storage"])
def test_a_recording_replays_to_the_hits_that_a_server_counted(tmp_path: Path, way: str) -> None:
    path, asked = tmp_path / "trace", _traffic(40, SERVER_PAGE, most=8, rest=30)
    began = time.monotonic()
    if way == "linker":
        options = linker(None, capacity="256MiB", record=str(path))
    else:
        options = storage(tmp_path / "slab", record=str(path))
    with server(tmp_path / "log", *options, "--enable-metrics") as running:
        answers = [running.ask(each) for each in asked]
        metrics = requests.get(f"{running._url}/metrics", timeout=60).text
    trace = _read(path)
    _check_times(path, began)
    assert trace.input_tokens.tolist() == [len(each) for each in asked]
    assert set(trace.output_tokens.tolist()) == {8}
    assert trace.block_tokens == SERVER_PAGE
    # Nothing had to leave.
    assert _replayed(trace, trace.num_references) == [answer.num_cached for answer in answers]
    (line,) = [splitline for splitline in metrics.splitlines() if 'outcome="written"' in splitline]
    assert line.startswith("sglang:kvtier_recorded_requests_total{")
    assert float(line.rpartition(" ")[2]) == len(asked)
