"""vLLM's server with what ``kvtier vllm-args`` prints: usage and metrics."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.connectors.vllm.shared.counts import METRICS
from kvtier.connectors.vllm.shared.fronts import OFFLOADING, OWN, front_named
from kvtier.observe.specs import VLLM_OWN
from tests.engines.vllm.engines import (
    BLOCK,
    connector,
    multi,
    own_connector,
    prompt,
)
from tests.engines.vllm.servers import serving
from tests.kit.waiting import wait_until

FRONT = front_named(os.environ.get("KVTIER_CONNECTOR", "auto"))
TELLS_STORES = {
    OFFLOADING.connector: ("vllm:kv_offload_store_bytes_total", ""),
    OWN.connector: ("vllm:kvtier_moved_bytes_total", "device"),
}
"""Metric of the bytes copied to host memory, and its label, by connector."""


def _printed(tmp_path: Path) -> list[str]:
    """Return vLLM's options as ``kvtier vllm-args`` prints them for a user."""
    command = [sys.executable, "-m", "kvtier.tools.cli", "vllm-args", "--host-capacity", "64MiB"]
    command += ["--connector", FRONT.connector]
    command += ["--disk-path", str(tmp_path), "--disk-capacity", "64MiB"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return shlex.split(printed)


def _ask(client: httpx.Client, seed: int, **headers: str) -> tuple[int, Any]:
    """Return the number of cached tokens, and the answer's log-probabilities."""
    tokens = prompt(seed, 6 * BLOCK + 50)["prompt_token_ids"]
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    answer = client.post("/v1/completions", json=body, headers=headers).raise_for_status().json()
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0, answer["choices"][0]["logprobs"]


def _metrics(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Return the metrics by name, and by tier, source, or the side that is copied from."""
    text, labels = client.get("/metrics").raise_for_status().text, ("tier", "source", "src")
    return {
        (sample.name, "".join(sample.labels.get(at, "") for at in labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _check_dashboard(client: httpx.Client) -> None:
    """Check that every declared metric is exposed, with its kind and labels.

    vLLM's own metrics may be missing with kvtier's own connector, which serves older versions.
    """
    text = client.get("/metrics").raise_for_status().text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    for spec in (*METRICS, *(VLLM_OWN if FRONT is OFFLOADING else ())):
        family = families[spec.name.removesuffix("_total")]
        assert family.type == spec.kind, spec
        for sample in family.samples:
            assert set(spec.labels) <= sample.labels.keys(), spec


@pytest.mark.timeout(900)
def test_hits_show_in_usage_and_metrics(tmp_path: Path) -> None:
    with serving(tmp_path, _printed(tmp_path)) as client:
        cold = [_ask(client, seed) for seed in range(12)]  # 84 blocks in 64
        again = [_ask(client, seed) for seed in range(12)]
        metrics = _metrics(client)
        _check_dashboard(client)
    assert [cached for cached, _ in cold] == [0] * 12
    for (cached, answer), (_, computed) in zip(again, cold, strict=True):
        assert cached in (0, 6 * BLOCK)  # loaded where that is faster than computing
        assert answer["tokens"] == computed["tokens"]
    loaded = metrics["vllm:kvtier_loaded_chunks_total", "host"]
    assert loaded * BLOCK <= sum(cached for cached, _ in again)
    assert metrics[TELLS_STORES[FRONT.connector]] > 0
    assert metrics["vllm:kvtier_used_chunks", "host"] == 72
    assert metrics["vllm:kvtier_used_chunks", "disk"] > 0
    assert metrics["vllm:kvtier_chunks", "disk"] == metrics["vllm:kvtier_chunks", "host"]


@pytest.mark.timeout(900)
def test_data_parallel_replicas_find_after_a_restart_what_each_has_stored(tmp_path: Path) -> None:
    connects = own_connector if FRONT is OWN else connector
    sizes = {"host_capacity": "256MiB", "disk_capacity": "256MiB"}
    config = json.dumps(connects(disk_path=str(tmp_path / "slab"), **sizes))
    options = ["--kv-transfer-config", config, "--data-parallel-size", "2"]
    cores = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    placed = [(seed, {"X-data-parallel-rank": str(seed % 2)}) for seed in range(4)]
    with serving(tmp_path, options, **bound) as client:
        assert [_ask(client, seed, **rank)[0] for seed, rank in placed] == [0] * 4
        warm = [_ask(client, seed, **rank) for seed, rank in placed]
        assert [cached for cached, _ in warm] == [6 * BLOCK] * 4
    with serving(tmp_path, options, **bound) as client:
        assert [_ask(client, seed, **rank) for seed, rank in placed] == warm
        (seed, _), *_ = placed
        assert _ask(client, seed, **{"X-data-parallel-rank": "1"})[0] == 0, "tiers of its own"


VLLMS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "PlainSpec",
        "spec_module_path": "tests.engines.vllm.plain",
        "cpu_bytes_to_use": 64 << 20,
    },
}


FAILS = connector(
    host_capacity="64MiB", spec_name="FaultySpec", spec_module_path="tests.engines.vllm.faulty"
)
"""Every second copy, the first one to begin with."""


@pytest.mark.skipif(FRONT is not OFFLOADING, reason="kvtier's own connector is by itself")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("inside", [[VLLMS], [FAILS, VLLMS]], ids=["vllms", "ours_before_vllms"])
def test_multi_connector_serves_and_tells_its_statistics(
    tmp_path: Path, inside: list[dict[str, Any]]
) -> None:
    connects = ["--kv-transfer-config", json.dumps(multi(*inside))]
    with serving(tmp_path, connects) as client:
        cold = [_ask(client, seed) for seed in range(12)]  # 84 blocks in 64
        again = [_ask(client, seed) for seed in range(12)]
        metrics = _metrics(client)
        title = "KV Transfer metrics"  # vLLM logs them every ten seconds
        wait_until(lambda: title in (tmp_path / "log").read_text(), title)
    answers = [answer["tokens"] for _, answer in again]
    assert answers == [answer["tokens"] for _, answer in cold]
    assert all(len(answer) == 4 for answer in answers)  # none ended early, by an error
    assert max(cached for cached, _ in again) == 6 * BLOCK
    assert metrics["vllm:kv_offload_store_bytes_total", ""] > 0
    assert (("vllm:kvtier_used_chunks", "host") in metrics) == (FAILS in inside)
    log = (tmp_path / "log").read_text()
    assert ("copy failed direction=load" in log) == (FAILS in inside)
