"""``kvtier vllm-args``: one option to paste."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import CodingConfig
from kvtier.tools.cli import app


def test_option_is_what_vllm_reads() -> None:
    done = CliRunner().invoke(
        app, ["vllm-args", "--host-capacity", "2GiB", "--blocks-per-chunk", "4"]
    )
    assert done.exit_code == 0
    option, value = shlex.split(done.stdout)
    assert option == "--kv-transfer-config"
    assert json.loads(value) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "kvtier",
            "host_capacity": "2GiB",
            "blocks_per_chunk": 4,
        },
    }


def test_json_alone_is_for_scripts() -> None:
    options = ["vllm-args", "--host-capacity", "2GiB"]
    pasted = CliRunner().invoke(app, options).stdout
    raw = CliRunner().invoke(app, [*options, "--json"]).stdout
    assert raw == shlex.split(pasted)[1] + "\n"
    assert json.loads(raw)["kv_connector"] == "OffloadingConnector"


def test_default_of_host_memory_is_what_vllm_gets_without() -> None:
    value = json.loads(CliRunner().invoke(app, ["vllm-args", "--json"]).stdout)
    given = value["kv_connector_extra_config"]["host_capacity"]
    assert given == VllmSettings().host_capacity
    guide = (Path(__file__).parents[3] / "docs/guides/vllm.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `host_capacity` \|.*\| \"(.*)\" \|$", guide, re.MULTILINE)
    assert given == row


def test_engine_over_a_node_has_no_tier_of_its_own() -> None:
    options = ["--node", "/run/kvtier/node.sock", "--node-tenant", "team-a"]
    done = CliRunner().invoke(app, ["vllm-args", "--json", *options])
    assert json.loads(done.stdout)["kv_connector_extra_config"] == {
        "spec_name": "kvtier",
        "node": "/run/kvtier/node.sock",
        "node_tenant": "team-a",
    }
    for command in ("vllm-args", "sglang-args", "serve"):
        long = CliRunner().invoke(app, [command, "--node", "/run/" + "d" * 110 + "/node.sock"])
        assert long.exit_code == 2
        assert "has 125 bytes, and that of a Unix socket at most 107" in long.stderr
    both = CliRunner().invoke(app, ["vllm-args", *options, "--storage", "valkey://host"])
    assert both.exit_code == 2
    assert "node: '/run/kvtier/node.sock' has the disk and the stores" in both.stderr


def test_capacity_of_a_disk_needs_a_disk() -> None:
    both = ["--disk-path", "/nvme/kv", "--disk-capacity", "200GiB"]
    done = CliRunner().invoke(app, ["vllm-args", *both])
    _, value = shlex.split(done.stdout)
    assert json.loads(value)["kv_connector_extra_config"] == {
        "spec_name": "kvtier",
        "host_capacity": "4GiB",
        "disk_path": "/nvme/kv",
        "disk_capacity": "200GiB",
    }
    done = CliRunner().invoke(app, ["vllm-args", *both[2:]])
    assert done.exit_code == 2
    assert "disk_capacity: '200GiB' needs a disk; name a folder in disk_path" in " ".join(
        done.stderr.split()
    )


def test_stores_stand_in_a_row() -> None:
    one = ["--storage", "valkey://cache.example"]
    done = CliRunner().invoke(app, ["vllm-args", *one])
    given = json.loads(shlex.split(done.stdout)[1])["kv_connector_extra_config"]
    assert given["storage"] == "valkey://cache.example"
    assert "storage_capacity" not in given
    both = [*one, "--storage", "s3://bucket/kv", "--storage-capacity", "10TiB"]
    done = CliRunner().invoke(app, ["vllm-args", *both])
    given = json.loads(shlex.split(done.stdout)[1])["kv_connector_extra_config"]
    assert given["storage"] == ["valkey://cache.example", "s3://bucket/kv"]
    assert given["storage_capacity"] == "10TiB"
    done = CliRunner().invoke(app, ["vllm-args", *one, *one])
    assert done.exit_code == 2
    assert "two tiers are called 'valkey'" in " ".join(done.stderr.split())


def test_recording_is_one_setting_more() -> None:
    done = CliRunner().invoke(
        app, ["vllm-args", "--record", "/log/t", "--record-max-bytes", "1MiB"]
    )
    given = json.loads(shlex.split(done.stdout)[1])["kv_connector_extra_config"]
    assert (given["record"], given["record_max_bytes"]) == ("/log/t", "1MiB")
    done = CliRunner().invoke(app, ["vllm-args", "--record", "/log/t", "--record-max-bytes", "1"])
    assert done.exit_code == 2
    assert "record_max_bytes: '1' is below 1 MiB" in " ".join(done.stderr.split())


def test_size_that_cant_be_read_is_refused() -> None:
    done = CliRunner().invoke(app, ["vllm-args", "--host-capacity", "plenty"])
    assert done.exit_code == 2
    assert "can't read 'plenty' as a size" in done.stderr


def test_policy_is_one_setting_more() -> None:
    done = CliRunner().invoke(app, ["vllm-args", "--eviction-policy", "lru"])
    given = json.loads(shlex.split(done.stdout)[1])["kv_connector_extra_config"]
    assert given["eviction_policy"] == "lru"
    done = CliRunner().invoke(app, ["vllm-args", "--eviction-policy", "fifo"])
    assert done.exit_code == 2
    assert "eviction_policy can't be 'fifo'" in " ".join(done.stderr.split())


def test_codec_and_key_are_settings_of_the_connector() -> None:
    options = ["--storage", "valkey://host", "--codec", "lossless", "--encryption-key", "env:KEYS"]
    done = CliRunner().invoke(app, ["vllm-args", "--json", *options])
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert (extra["codec"], extra["encryption_key"]) == ("lossless", "env:KEYS")
    settings = VllmSettings.read(extra)
    assert settings.stores == ["valkey://host"]
    assert settings.coding == CodingConfig("lossless", "env:KEYS")
