"""``kvtier sglang-args``: options to paste."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.kit.cli import kvtier, refused

DISK = ("--disk-path", "/nvme/kv", "--disk-capacity", "200GiB")
HOST = ("--host-capacity", "64GiB")
STORES = ("--storage", "valkey://cache.example", "--storage", "s3://bucket/kv")


def settings_of(*options: str) -> dict[str, Any]:
    """Return the settings of the back end, or of the linker if there is host memory."""
    done = kvtier("sglang-args", "--json", *options)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return dict(found.get("linker_extra_config", found))


def test_options_are_what_sglang_reads_and_json_alone_is_for_scripts() -> None:
    given = ("sglang-args", *DISK, "--load-policy", "always")
    *options, value = shlex.split(kvtier(*given).stdout)
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
    assert kvtier(*given, "--json").stdout == value + "\n"


def test_store_stands_in_the_place_of_the_disk_or_behind_that_of_the_linker() -> None:
    given = settings_of(*STORES[:2])
    assert given["storage"] == "valkey://cache.example"
    assert "disk_path" not in given
    given = settings_of(*HOST, *DISK, *STORES)
    assert given["storage"] == ["valkey://cache.example", "s3://bucket/kv"]
    assert given["disk_path"] == "/nvme/kv"


@pytest.mark.parametrize("host", [(), HOST])
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--record", "/log/trace"), {"record": "/log/trace"}),
        (("--eviction-policy", "lru"), {"eviction_policy": "lru"}),
        (
            ("--codec", "lossless", "--encryption-key", "env:KEYS"),
            {"codec": "lossless", "encryption_key": "env:KEYS"},
        ),
    ],
    ids=["record", "policy", "codec"],
)
def test_options_are_settings_of_both_fronts(
    host: tuple[str, ...], options: tuple[str, ...], settings: dict[str, Any]
) -> None:
    assert settings_of(*host, *DISK, *options).items() - settings_of(*host, *DISK).items() == (
        settings.items()
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (STORES, "one store is allowed here"),
        ((*DISK, "--load-policy", "never"), "'never' is not one of 'auto', 'always'"),
        ((*DISK[:3], "plenty"), "can't read 'plenty' as a size"),
        ((*DISK, "--eviction-policy", "fifo"), "--eviction-policy can't be 'fifo'"),
    ],
)
def test_what_cant_be_used_is_refused(options: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("sglang-args", *options)
