"""Every alert by promtool: it fires when it should, and not in a similar but harmless case."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from .prometheus import MISSING, TOOL, promtool
from .shown import ALERTS, RULES

pytestmark = pytest.mark.skipif(TOOL is None, reason=MISSING)


@dataclass(frozen=True)
class Case:
    """Values a minute apart, by series (labels without job and instance), and when to evaluate.

    labels: the alert's own labels, besides those that every alert has.
    """

    alert: str
    at: str
    fires: dict[str, str]
    silent: dict[str, str]
    labels: dict[str, str]


_WAY = {"src": "disk", "dst": "host"}
_OF_NO_USE = "sglang:storage_prefetch_unfulfilled_tokens_total{reason="


def _below_floor(free: int) -> dict[str, str]:
    return {
        'kvtier_node_tenant_bytes{tenant="a"': "100x120",
        'kvtier_node_floor_bytes{tenant="a"': "200x120",
        'kvtier_node_lookup_blocks_total{tenant="a",place="nowhere"': "0+100x120",
        "kvtier_node_free_bytes{": f"{free}x120",
        "kvtier_node_segment_bytes{": "1024x120",
    }


CASES = (
    Case(
        "KvtierBlocksDamaged",
        "150m",
        # The series begins with the first damaged block.
        {'kvtier_damaged_blocks_total{tier="disk"': "_x140 1x60"},
        {'kvtier_damaged_blocks_total{tier="disk"': "1x200"},
        {"tier": "disk"},
    ),
    Case(
        "KvtierAuditDifferent",
        "150m",
        # The series begins with the first difference.
        {'kvtier_audits_total{tier="host",outcome="different"': "_x140 1x60"},
        {'kvtier_audits_total{tier="host",outcome="equal"': "0+1x200"},
        {"tier": "host"},
    ),
    Case(
        "KvtierCopiesFail",
        "40m",
        {
            'kvtier_failed_copies_total{src="disk",dst="host"': "0+1x60",
            'kvtier_copy_seconds_count{src="disk",dst="host"': "0+4x60",
        },
        {
            'kvtier_failed_copies_total{src="disk",dst="host"': "0+1x60",
            'kvtier_copy_seconds_count{src="disk",dst="host"': "0+100x60",
        },
        _WAY,
    ),
    Case(
        "KvtierCopiesFail",
        "40m",
        {'kvtier_failed_copies_total{src="disk",dst="host"': "0+1x60"},  # and none that succeeds
        {'kvtier_failed_copies_total{src="disk",dst="host"': "0 0 1 1x60"},  # one is no state
        _WAY,
    ),
    Case(
        "KvtierTierLeftAlone",
        "30m",
        {'kvtier_breaker_state{tier="valkey"': "2x60"},
        {'kvtier_breaker_state{tier="valkey"': "0 2 1 0x60"},
        {"tier": "valkey"},
    ),
    Case(
        "KvtierSlabCutShort",
        "30m",
        {'kvtier_breaker_state{tier="disk"': "0x20 3x40"},
        {'kvtier_breaker_state{tier="disk"': "0 3 3 0 2x60"},
        {"tier": "disk"},
    ),
    Case(
        "KvtierLoadsLate",
        "40m",
        {"kvtier_late_loads_total{": "0+1x60", "kvtier_requests_total{": "0+10x60"},
        {"kvtier_late_loads_total{": "0+1x60", "kvtier_requests_total{": "0+100x60"},
        {},
    ),
    Case(
        "KvtierPredictsBadly",
        "90m",
        {
            'kvtier_actual_load_seconds_total{src="disk"': "0+3x120",
            'kvtier_predicted_load_seconds_total{src="disk"': "0+1x120",
            'kvtier_load_error_ratio_count{src="disk"': "0+10x120",
        },
        {
            'kvtier_actual_load_seconds_total{src="disk"': "0+3x120",
            'kvtier_predicted_load_seconds_total{src="disk"': "0+2x120",
            'kvtier_load_error_ratio_count{src="disk"': "0+10x120",
        },
        {"src": "disk"},
    ),
    Case(
        "KvtierNoRoom",
        "90m",
        {
            'kvtier_refused_blocks_total{tier="host"': "0+100x120",
            "kvtier_prompt_blocks_total{": "0+500x120",
        },
        {
            'kvtier_refused_blocks_total{tier="host"': "0+100x120",
            "kvtier_prompt_blocks_total{": "0+5000x120",
        },
        {"tier": "host"},
    ),
    Case(
        "KvtierStorageFallsBehind",
        "90m",
        {
            'kvtier_unwritten_blocks_total{tier="disk"': "0+200x120",
            "kvtier_prompt_blocks_total{": "0+500x120",
        },
        {
            'kvtier_unwritten_blocks_total{tier="disk"': "0+2x120",
            "kvtier_prompt_blocks_total{": "0+5x120",
        },
        {"tier": "disk"},
    ),
    Case(
        "KvtierWantedAgain",
        "150m",
        {
            'kvtier_returned_blocks_total{tier="host"': "0+100x200",
            'kvtier_evicted_blocks_total{tier="host"': "0+200x200",
        },
        {
            'kvtier_returned_blocks_total{tier="host"': "0+100x200",
            'kvtier_evicted_blocks_total{tier="host"': "0+1000x200",
        },
        {"tier": "host"},
    ),
    Case(
        "KvtierRarelyFound",
        "460m",
        {"kvtier_prompt_blocks_total{": "0+100x500"},  # nothing was ever found
        {
            "kvtier_prompt_blocks_total{": "0+100x500",
            'kvtier_hit_blocks_total{tier="device"': "0+10x500",
        },
        {},
    ),
    Case(
        "KvtierServerFails",
        "40m",
        {
            'kvtier_server_requests_total{endpoint="chat",status="500"': "0+1x60",
            'kvtier_server_requests_total{endpoint="chat",status="200"': "0+20x60",
        },
        {
            'kvtier_server_requests_total{endpoint="chat",status="503"': "0+1x60",
            'kvtier_server_requests_total{endpoint="chat",status="200"': "0+20x60",
        },
        {},
    ),
    Case(
        "KvtierServerTurnsAway",
        "40m",
        {
            'kvtier_server_requests_total{endpoint="chat",status="429"': "0+2x60",
            'kvtier_server_requests_total{endpoint="chat",status="200"': "0+20x60",
        },
        {
            'kvtier_server_requests_total{endpoint="chat",status="401"': "0+2x60",
            'kvtier_server_requests_total{endpoint="chat",status="200"': "0+20x60",
        },
        {},
    ),
    Case(
        "VllmKvtierBlocksFail",
        "40m",
        {'vllm:kvtier_failed_chunks_total{src="disk",dst="host"': "0+2x60"},
        {'vllm:kvtier_failed_chunks_total{src="disk",dst="host"': "0 5 5x60"},
        _WAY,
    ),
    Case(
        "VllmKvtierImpatient",
        "90m",
        {
            "vllm:kvtier_impatient_requests_total{": "0+1x120",
            'vllm:request_success_total{finished_reason="stop"': "0+3x120",
        },
        {
            "vllm:kvtier_impatient_requests_total{": "0+1x120",
            'vllm:request_success_total{finished_reason="stop"': "0+100x120",
        },
        {},
    ),
    Case(
        "SglangKvtierReadsFail",
        "60m",
        {
            _OF_NO_USE + '"storage_transfer"': "0+100x90",
            "sglang:storage_prefetch_hit_tokens_total{": "0+500x90",
        },
        {
            _OF_NO_USE + '"deadline"': "0+100x90",
            "sglang:storage_prefetch_hit_tokens_total{": "0+500x90",
        },
        {},
    ),
    Case(
        "KvtierNodeEnginesPause",
        "30m",
        {'kvtier_node_engine_pauses_total{tenant="a",engine="e"': "0x20 3x40"},
        {'kvtier_node_engine_pauses_total{tenant="a",engine="e"': "3x20 4x40"},
        {"tenant": "a", "engine": "e"},
    ),
    Case(
        "KvtierNodeLate",
        "60m",
        {
            'kvtier_node_lookup_seconds_bucket{le="0.005"': "0+95x90",
            'kvtier_node_lookup_seconds_bucket{le="0.01"': "0+100x90",
            'kvtier_node_lookup_seconds_bucket{le="+Inf"': "0+100x90",
            "kvtier_node_lookup_seconds_count{": "0+100x90",
        },
        {
            'kvtier_node_lookup_seconds_bucket{le="0.005"': "0+100x90",
            'kvtier_node_lookup_seconds_bucket{le="0.01"': "0+100x90",
            'kvtier_node_lookup_seconds_bucket{le="+Inf"': "0+100x90",
            "kvtier_node_lookup_seconds_count{": "0+100x90",
        },
        {},
    ),
    Case(
        "KvtierNodeBelowFloor",
        "90m",
        _below_floor(free=0),
        _below_floor(free=4096),  # it needs no more
        {"tenant": "a"},
    ),
)

EVERY = {"job": "kvtier", "instance": "a:8000"}


def _inputs(series: dict[str, str]) -> list[dict[str, str]]:
    every = ",".join(f'{name}="{value}"' for name, value in EVERY.items())
    return [
        {"series": f"{name}{'' if name.endswith('{') else ','}{every}}}", "values": values}
        for name, values in series.items()
    ]


def _said(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)


def test_rules_are_what_prometheus_reads() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", RULES)


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_where_it_should_and_nowhere_else(case: Case, tmp_path: Path) -> None:
    alert = next(each for each in ALERTS if each.name == case.alert)
    labels = {**EVERY, **case.labels}
    fired = {
        "exp_labels": {**labels, "severity": alert.severity},
        "exp_annotations": {
            "summary": _said(alert.summary, labels),
            "description": _said(alert.advice, labels),
        },
    }
    tests = [
        {
            "interval": "1m",
            "input_series": _inputs(series),
            "alert_rule_test": [
                {"eval_time": case.at, "alertname": alert.name, "exp_alerts": expected}
            ],
        }
        for series, expected in ((case.fires, [fired]), (case.silent, []))
    ]
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", path)
