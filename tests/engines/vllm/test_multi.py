"""vLLM's MultiConnector over kvtier, and over vLLM's own connector where kvtier is installed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engines.vllm.engines import (
    BLOCK,
    connector,
    count,
    engine,
    multi,
    one_by_one,
    own_connector,
    prompt,
)
from tests.engines.vllm.scheduler_half import HASHER, make_config, make_half

INSIDE = {
    "ours": ["ours"],
    "theirs": ["theirs"],
    "theirs, recorded": ["recorded"],
    "ours first": ["ours", "theirs"],
    "theirs first": ["theirs", "ours"],
    "nested": ["nested"],
}


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return make_config()


def _connectors(trace: Path) -> dict[str, dict[str, Any]]:
    theirs = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    ours = connector(host_capacity="1MiB", record=str(trace))
    return {
        "ours": ours,
        "nested": multi(ours),
        "theirs": connector(**theirs),
        "recorded": connector(**theirs, record=str(trace)),
    }


OWN = "KvtierConnector"


def _example(folder: Path) -> dict[str, Any]:
    """Return vLLM's example of a connector, which keeps prompts in files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [OWN, "OffloadingConnector"])
def test_failed_loads_beside_another_connector_are_computed(tmp_path: Path, kind: str) -> None:
    """The server shows the statistics of the connectors inside."""
    faulty = connector(
        host_capacity="256MiB", spec_name="FaultySpec", spec_module_path="tests.engines.vllm.faulty"
    )
    if kind == OWN:
        faulty = own_connector(host_capacity="256MiB")
        faulty["kv_connector"] = "FaultyConnector"
        faulty["kv_connector_module_path"] = "tests.engines.vllm.faulty_connector"
    some = prompt(5, 3 * BLOCK + 50)
    with engine(multi(faulty, _example(tmp_path))) as llm:
        ((_, cold),) = one_by_one(llm, [some])
        for _ in range(6):  # kvtier's copies fail every second time
            for file in tmp_path.iterdir():  # of the other connector, which loads nothing
                shutil.rmtree(file)
            assert llm.reset_prefix_cache()
            ((_, answer),) = one_by_one(llm, [some])
            assert list(answer[0]) == list(cold[0])
        assert count("vllm:kvtier_loaded_chunks_total", tier="host") > 0


def _statistics(half: Any) -> Any:
    """Return statistics of one request, as vLLM's front end gets them from another process."""
    tokens = prompt(1, 200)["prompt_token_ids"]
    request = Request("1", tokens, SamplingParams(), None, block_hasher=HASHER)
    half.on_new_request(request)
    half.get_num_new_matched_tokens(request, 0)
    request.num_computed_tokens = len(tokens)
    half.request_finished_all_groups(request, ([],))
    half.shutdown()  # until the request is recorded
    stats = SchedulerStats(kv_connector_stats=half.get_kv_connector_stats().to_dict())
    sent = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
    return sent.kv_connector_stats


@pytest.mark.parametrize("setting", [{"mode": "save_only"}, {"recompute_failed_loads": False}])
def test_an_operators_policy_for_failed_loads_stays_where_kvtier_leaves_it(
    config: VllmConfig, setting: dict[str, object]
) -> None:
    ours = connector(host_capacity="1MiB", **setting)
    make_half(config, multi(ours)).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_statistics_are_shown_and_failed_loads_are_computed(
    config: VllmConfig, tmp_path: Path, inside: list[str]
) -> None:
    is_asked_for = not {"ours", "nested"}.isdisjoint(inside)
    there = _connectors(tmp_path / "trace")
    half = make_half(config, multi(*(there[name] for name in inside)))
    policy = config.kv_transfer_config.kv_load_failure_policy
    assert policy == ("recompute" if is_asked_for else "fail")
    statistics = _statistics(half)
    logging, logged = KVConnectorLogging(config.kv_transfer_config), []
    logging.observe(statistics)
    logging.log(lambda text, *words: logged.append(text % words))
    assert "vllm:kv_offload_lookup_sync_delay_seconds" in logged[0]
    unregister_vllm_metrics()  # those of engines before it
    try:
        KVConnectorProm(config, ["engine"], {0: ["0"]}).observe(statistics)
        assert count("vllm:kv_offload_lookup_sync_delay_seconds_count") > 0
        assert count("vllm:kvtier_recorded_requests_total", outcome="written") == is_asked_for
    finally:
        unregister_vllm_metrics()
    assert (tmp_path / "trace").exists() == (inside != ["theirs"])
