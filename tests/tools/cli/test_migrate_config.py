"""``kvtier migrate-config``: others' configurations become kvtier's, or are named."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.tools.cli import app

LMCACHE = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 2.5
local_disk: "file:///nvme0/kv,file:///nvme1/kv"
max_local_disk_size: 100
remote_url: "mooncakestore://10.0.0.9:50051"
remote_serde: cachegen
cache_policy: LFU
save_decode_cache: true
enable_blending: true
enable_p2p: false
audit_actual_remote_url: "redis://elsewhere"
"""


def _migrated(text: str, *options: str) -> tuple[dict[str, Any], str]:
    """Return the value of ``--kv-transfer-config``, and what is on standard error."""
    result = _run(text, *options)
    assert result.exit_code == 0, result.stderr
    option, value = shlex.split(result.stdout)
    assert option == "--kv-transfer-config"
    return json.loads(value), result.stderr


def _run(text: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["migrate-config", "-", *options], input=text)


def test_an_lmcache_file_becomes_settings_and_notes() -> None:
    config, notes = _migrated(LMCACHE, "--ranks", "2")
    assert config == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "kvtier",
            "host_capacity": "5GiB",
            "disk_path": ["/nvme0/kv", "/nvme1/kv"],
            "disk_capacity": "200GiB",
            "storage": "mooncake://10.0.0.9:50051",
            "codec": "lossless",
            "eviction_policy": "lfuda",
            "offload_prompt_only": False,
        },
    }
    VllmSettings.read(config["kv_connector_extra_config"])
    named = [line.partition(":")[0] for line in notes.splitlines()]
    assert named == ["chunk_size", "remote_serde", "enable_blending", "audit_actual_remote_url"]


def test_variables_of_lmcache_become_variables_of_kvtier() -> None:
    text = 'export LMCACHE_LOCAL_CPU=True\nLMCACHE_MAX_LOCAL_CPU_SIZE="20"\n'
    text += "LMCACHE_REMOTE_URL=lm://host:65432\nLMCACHE_USE_LAYERWISE=False\n"
    _, notes = _migrated(text)
    lines = notes.splitlines()
    assert lines[1] == "KVTIER_HOST_CAPACITY=20GiB"
    assert [line.partition(":")[0] for line in lines[2:]] == ["max_local_cpu_size", "remote_url"]


def test_connectors_that_move_kv_between_servers_stay_beside_kvtier() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    own = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8 << 30,
            "eviction_policy": "arc",
            "block_size": 256,
            "secondary_tiers": [{"type": "fs", "root_dir": "/nvme/kv"}, {"type": "p2p"}],
        },
    }
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [nixl, own]},
    }
    config, notes = _migrated(json.dumps(given))
    assert config["kv_connector"] == "MultiConnector"
    assert config["kv_buffer_device"] == "cpu"
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert first == nixl
    assert second["kv_connector_extra_config"] == {
        "spec_name": "kvtier",
        "host_capacity": "8GiB",
        "eviction_policy": "arc",
        "block_size": 256,
        "disk_path": "/nvme/kv",
    }
    assert "secondary_tiers: p2p has no counterpart" in notes


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer"},
            "mode",
            "save_only",
        ),
        ({"master_server_address": "m:50051", "protocol": "rdma"}, "storage", "mooncake://m:50051"),
        (
            {"ucm_connectors": [{"ucm_connector_config": {"storage_backends": "/mnt/kv"}}]},
            "disk_path",
            "/mnt/kv",
        ),
    ],
)
def test_files_of_other_caches_are_read(given: dict[str, Any], setting: str, value: str) -> None:
    config, _ = _migrated(json.dumps(given))
    assert config["kv_connector_extra_config"][setting] == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "no settings in it; give an LMCache"),
        ("a: [", "neither YAML nor JSON"),
        ("max_local_cpu_size: much", "max_local_cpu_size can't be 'much'; write a number"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, sentence: str) -> None:
    result = _run(text)
    assert result.exit_code != 0
    assert sentence in str(result.exception) + result.output
