"""``kvtier vllm-args``: one option to paste."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import CodingConfig
from tests.kit.cli import kvtier, refused

NODE = ("--node", "/run/kvtier/node.sock", "--node-tenant", "team-a")
STORE = ("--storage", "valkey://cache.example")


def settings_of(*options: str) -> dict[str, Any]:
    """Return the connector's settings."""
    done = kvtier("vllm-args", "--json", *options)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)["kv_connector_extra_config"]
    assert found.pop("spec_name") == "kvtier"
    return found


def test_option_is_what_vllm_reads_and_json_alone_is_for_scripts() -> None:
    options = ("vllm-args", "--host-capacity", "2GiB", "--blocks-per-chunk", "4")
    option, value = shlex.split(kvtier(*options).stdout)
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
    assert kvtier(*options, "--json").stdout == value + "\n"


def test_grid_needs_a_scheduler_of_kvtiers() -> None:
    printed = shlex.split(kvtier("vllm-args", "--grid", "512").stdout)
    assert printed[:2] == ["--scheduler-cls", "kvtier.connectors.vllm.entry.GridScheduler"]
    assert printed[2] == "--kv-transfer-config"
    assert settings_of("--grid", "512")["grid"] == 512


def test_default_of_host_memory_is_what_vllm_gets_without() -> None:
    given = settings_of()["host_capacity"]
    assert given == VllmSettings().host_capacity
    guide = (Path(__file__).parents[3] / "docs/guides/vllm.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `host_capacity` \|.*\| \"(.*)\" \|$", guide, re.MULTILINE)
    assert given == row


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (NODE, {"node": "/run/kvtier/node.sock", "node_tenant": "team-a"}),
        (
            ("--disk-path", "/nvme/kv", "--disk-capacity", "200GiB"),
            {"host_capacity": "4GiB", "disk_path": "/nvme/kv", "disk_capacity": "200GiB"},
        ),
        (STORE, {"host_capacity": "4GiB", "storage": "valkey://cache.example"}),
        (
            (*STORE, "--storage", "s3://bucket/kv", "--storage-capacity", "10TiB"),
            {
                "host_capacity": "4GiB",
                "storage": ["valkey://cache.example", "s3://bucket/kv"],
                "storage_capacity": "10TiB",
            },
        ),
        (
            ("--record", "/log/t", "--record-max-bytes", "1MiB"),
            {"host_capacity": "4GiB", "record": "/log/t", "record_max_bytes": "1MiB"},
        ),
        (("--eviction-policy", "lru"), {"host_capacity": "4GiB", "eviction_policy": "lru"}),
    ],
    ids=["node", "disk", "store", "stores", "record", "policy"],
)
def test_options_are_settings_of_the_connector(
    options: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """An engine over a node has no tier of its own."""
    assert settings_of(*options) == settings


def test_codec_and_key_are_read_by_the_connector() -> None:
    options = ("--storage", "valkey://host", "--codec", "lossless", "--encryption-key", "env:KEYS")
    settings = VllmSettings.read({"spec_name": "kvtier", **settings_of(*options)})
    assert settings.stores == ["valkey://host"]
    assert settings.coding == CodingConfig("lossless", "env:KEYS")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            (*NODE, "--storage", "valkey://host"),
            "--node: '/run/kvtier/node.sock' has the disk and the stores",
        ),
        (
            ("--disk-capacity", "200GiB"),
            "--disk-capacity: '200GiB' needs a disk; name a folder in --disk-path",
        ),
        ((*STORE, *STORE), "two tiers are called 'valkey'"),
        (
            ("--record", "/log/t", "--record-max-bytes", "1"),
            "--record-max-bytes: '1' is below 1 MiB",
        ),
        (("--host-capacity", "plenty"), "can't read 'plenty' as a size"),
        (("--eviction-policy", "fifo"), "--eviction-policy can't be 'fifo'"),
    ],
)
def test_what_cant_be_used_is_refused(options: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("vllm-args", *options)


@pytest.mark.parametrize("command", ["vllm-args", "sglang-args", "serve"])
def test_path_of_a_nodes_socket_has_its_length(command: str) -> None:
    sentence = "has 125 bytes, and that of a Unix socket at most 107"
    assert sentence in refused(command, "--node", "/run/" + "d" * 110 + "/node.sock")
