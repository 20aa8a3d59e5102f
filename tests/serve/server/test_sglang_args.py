"""``kvtier sglang-args``: options to paste."""

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from kvtier.tools.cli import app

DISK = ["--disk-path", "/nvme/kv", "--disk-capacity", "200GiB"]


def test_options_are_what_sglang_reads() -> None:
    done = CliRunner().invoke(app, ["sglang-args", *DISK, "--load-policy", "always"])
    assert done.exit_code == 0
    *options, value = shlex.split(done.stdout)
    assert options == [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
    ]
    assert json.loads(value) == {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang.entry",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "disk_path": "/nvme/kv",
        "disk_capacity": "200GiB",
        "load_policy": "always",
    }


def test_store_stands_in_the_place_of_the_disk() -> None:
    done = CliRunner().invoke(app, ["sglang-args", "--storage", "valkey://cache.example"])
    assert done.exit_code == 0
    given = json.loads(shlex.split(done.stdout)[-1])
    assert given["storage"] == "valkey://cache.example"
    assert "disk_path" not in given


def test_stores_stand_behind_the_disk_of_the_linker() -> None:
    stores = ["--storage", "valkey://cache.example", "--storage", "s3://bucket/kv"]
    host = ["--host-capacity", "64GiB"]
    done = CliRunner().invoke(app, ["sglang-args", *host, *DISK, *stores])
    assert done.exit_code == 0
    given = json.loads(shlex.split(done.stdout)[-1])["linker_extra_config"]
    assert given["storage"] == ["valkey://cache.example", "s3://bucket/kv"]
    assert given["disk_path"] == "/nvme/kv"
    done = CliRunner().invoke(app, ["sglang-args", *stores])
    assert done.exit_code == 2
    assert "one store is allowed here" in " ".join(done.stderr.split())


@pytest.mark.parametrize("host", [[], ["--host-capacity", "64GiB"]])
def test_recording_is_one_setting_more(host: list[str]) -> None:
    done = CliRunner().invoke(app, ["sglang-args", *host, *DISK, "--record", "/log/trace"])
    assert done.exit_code == 0
    given = json.loads(shlex.split(done.stdout)[-1])
    given = given.get("linker_extra_config", given)
    assert given["record"] == "/log/trace"
    assert "record_max_bytes" not in given


def test_value_that_cant_be_used_is_refused() -> None:
    done = CliRunner().invoke(app, ["sglang-args", *DISK, "--load-policy", "never"])
    assert done.exit_code == 2
    assert "'never' is not one of 'auto', 'always'" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, ["sglang-args", *DISK[:3], "plenty"])
    assert done.exit_code == 2
    assert "can't read 'plenty' as a size" in " ".join(done.stderr.split())


def test_policy_is_one_setting_more() -> None:
    done = CliRunner().invoke(app, ["sglang-args", *DISK, "--eviction-policy", "lru"])
    assert json.loads(shlex.split(done.stdout)[-1])["eviction_policy"] == "lru"
    done = CliRunner().invoke(app, ["sglang-args", *DISK, "--eviction-policy", "fifo"])
    assert done.exit_code == 2
    assert "eviction_policy can't be 'fifo'" in " ".join(done.stderr.split())


def test_json_alone_is_for_scripts() -> None:
    pasted = CliRunner().invoke(app, ["sglang-args", *DISK]).stdout
    raw = CliRunner().invoke(app, ["sglang-args", *DISK, "--json"]).stdout
    assert raw == shlex.split(pasted)[-1] + "\n"
    assert json.loads(raw)["backend_name"] == "kvtier"


def test_codec_and_key_are_settings_of_both_fronts() -> None:
    options = ["--storage", "s3://bucket", "--codec", "lossless", "--encryption-key", "env:KEYS"]
    ours = {"storage": "s3://bucket", "codec": "lossless", "encryption_key": "env:KEYS"}
    back_end = CliRunner().invoke(app, ["sglang-args", "--json", *options])
    assert ours.items() <= json.loads(back_end.stdout).items()
    linker = CliRunner().invoke(app, ["sglang-args", "--json", "--host-capacity=1GiB", *options])
    assert ours.items() <= json.loads(linker.stdout)["linker_extra_config"].items()
