"""Requests of vLLM, recorded and replayed: by its scheduler alone, and by a real vLLM."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.request import Request

from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector
from kvtier.core.errors import ConfigError
from kvtier.index.policies.replayed import LRU
from kvtier.observe.recording import Chains
from kvtier.tools.replay.policies import Replayer
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from tests.engines.vllm.engines import (
    BLOCK,
    NUM_BLOCKS,
    connector,
    count,
    engine,
    prompt,
    run,
)
from tests.engines.vllm.scheduler_half import HASHER, make_config, make_half
from tests.kit.waiting import wait_until

SPECS: dict[str, dict[str, Any]] = {
    "kvtier": {"spec_name": "kvtier", "host_capacity": "1MiB"},
    "vLLM's own": {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20},
}


def _read(path: Path) -> Trace:
    return read_traces([path], ReadOptions(Chains(b"s" * 32, 64)))


@pytest.fixture(scope="module")
def made() -> VllmConfig:
    return make_config()


def _half(made: VllmConfig, replica: int = 0, **extra: object) -> Any:
    """Return the scheduler's half of the connector that vLLM makes for these settings."""
    return make_half(made, connector(**extra), replica)


def _ask(half: Any, name: str, tokens: Sequence[int], num_output: int = 1, **more: Any) -> None:
    """Add a request, compute it, and finish it."""
    params = SamplingParams(max_tokens=max(1, num_output))
    request = Request(name, list(tokens), params, None, block_hasher=HASHER, **more)
    half.on_new_request(request)
    if num_output:
        request.num_computed_tokens = len(tokens)
        request.append_output_token_ids([7] * num_output)
    half.request_finished_all_groups(request, ([],))


@pytest.mark.parametrize("spec", SPECS)
def test_scheduler_records_what_was_computed(made: VllmConfig, tmp_path: Path, spec: str) -> None:
    half = _half(made, **SPECS[spec], record=str(tmp_path / "trace"))
    assert isinstance(half, KvtierOffloadingConnector) == (spec == "kvtier")
    assert isinstance(half, OffloadingConnector)
    tokens = prompt(1, 200)["prompt_token_ids"]
    _ask(half, "1", tokens, num_output=60)
    _ask(half, "2", [*tokens[:130], 3], num_output=2)
    _ask(half, "3", tokens, cache_salt="other")
    _ask(half, "4", tokens, num_output=0)  # it was called off before its turn
    half.shutdown()
    trace = _read(tmp_path / "trace")
    assert trace.block_tokens == 64
    assert trace.input_tokens.tolist() == [200, 131, 200]
    assert trace.output_tokens.tolist() == [60, 2, 1]
    assert trace.lengths.tolist() == [3, 2, 3]
    found = Replayer(trace, find_segments(trace)).hits(LRU, 100).found
    assert found.tolist() == [0, 2, 0]
    if spec == "kvtier":
        stats = half.get_kv_connector_stats().data["data"]
        assert stats["vllm:kvtier_recorded_requests"] == {("written",): 3}


def test_a_clock_that_is_set_moves_no_request(made: VllmConfig, tmp_path: Path) -> None:
    half = _half(made, **SPECS["kvtier"], record=str(tmp_path / "trace"))
    tokens = prompt(1, 200)["prompt_token_ids"]
    for name, arrival in (("1", 100_000.0), ("2", 1.7e9), ("3", 100_000.0)):
        _ask(half, name, tokens, arrival_time=arrival)
    half.shutdown()
    assert _read(tmp_path / "trace").window_s < 600


def test_vllms_own_connector_stays_where_nothing_is_recorded(made: VllmConfig) -> None:
    half = _half(made, **SPECS["vLLM's own"])
    assert type(half) is OffloadingConnector
    half.shutdown()


@pytest.mark.parametrize("spec", SPECS)
def test_file_that_cant_be_written_is_one_sentence(
    made: VllmConfig, tmp_path: Path, spec: str, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's own handlers, and its level, are kvtier's where it has none.
    logger = logging.getLogger("kvtier.connectors.common.recording")
    caplog.set_level(logging.WARNING, logger.name)
    logger.addHandler(caplog.handler)
    half = _half(made, **SPECS[spec], record=str(tmp_path))
    logger.removeHandler(caplog.handler)
    told = f"record: can't write {tmp_path}: Is a directory"
    assert f"kvtier serves without a recording: {told}" in caplog.messages
    _ask(half, "1", range(100))
    half.shutdown()


@pytest.mark.parametrize("spec", SPECS)
def test_setting_of_another_kind_is_refused(made: VllmConfig, spec: str) -> None:
    with pytest.raises(ConfigError, match="record can't be 7; name a file"):
        _half(made, **SPECS[spec], record=7)


def test_replicas_write_files_of_their_own(made: VllmConfig, tmp_path: Path) -> None:
    settings = {**SPECS["kvtier"], "record": str(tmp_path / "trace.jsonl")}
    halves = [_half(made, replica, **settings) for replica in (0, 1)]
    for half in halves:
        half.shutdown()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["trace-replica1.jsonl", "trace.jsonl"]


def _traffic(num_requests: int) -> list[dict[str, list[int]]]:
    """Conversations that grow, in turns: each block they share is a whole one of vLLM's."""
    rng = random.Random(3)
    histories = [prompt(seed, 2 * BLOCK)["prompt_token_ids"] for seed in range(8)]
    asked = []
    for number in range(num_requests):
        at = rng.randrange(len(histories))
        if len(histories[at]) >= 8 * BLOCK:
            histories[at] = prompt(1000 + number, BLOCK)["prompt_token_ids"]
        new = prompt(100 + number, BLOCK * rng.randint(1, 2))["prompt_token_ids"]
        histories[at] = histories[at] + new
        asked.append({"prompt_token_ids": [*histories[at], *range(20, 70)]})
    return asked


@pytest.mark.timeout(900)
def test_a_recording_replays_to_the_hits_that_vllm_counted(tmp_path: Path) -> None:
    path, asked = tmp_path / "trace", _traffic(64)
    # Host memory has more than the device, and less than all: what LRU keeps there is what is hit.
    lru = connector(host_capacity="48MiB", record=str(path), eviction_policy="lru")
    with engine(lru) as llm:
        answers = [run(llm, each)[0] for each in asked]
        room = int(count("vllm:kvtier_chunks", tier="host"))
        wait_until(
            lambda: len(path.read_bytes().splitlines()) > len(asked), "every request is recorded"
        )
        run(llm, prompt(9999, 20))  # one more step, which reports the metrics
        counted = count("vllm:kvtier_recorded_requests_total", outcome="written")
    trace = _read(path)
    num = len(asked)
    assert room > NUM_BLOCKS
    assert counted >= num
    assert trace.input_tokens[:num].tolist() == [len(each["prompt_token_ids"]) for each in asked]
    assert set(trace.output_tokens.tolist()) == {6}
    replayed = Replayer(trace, find_segments(trace)).hits(LRU, room).found[:num]
    assert (replayed * BLOCK).tolist() == [cached for cached, _ in answers]
    everything = Replayer(trace, find_segments(trace)).hits(LRU, trace.num_references).found
    assert 0 < replayed.sum() < everything.sum()
