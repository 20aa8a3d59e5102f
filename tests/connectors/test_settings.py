"""Settings in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.settings import VllmSettings, set_failure_policy
from kvtier.core.errors import ConfigError

DISK = {"disk_path": "/nvme", "disk_capacity": "1GiB"}


def test_settings_are_read_and_refused_by_name() -> None:
    assert VllmSettings.read({"spec_name": "kvtier", "host_capacity": "2GiB"}).host_bytes == 2 << 30
    assert VllmSettings.read({"blocks_per_chunk": 4}).host_capacity == "4GiB"
    for extra, told in (
        (
            {"hosts_capacity": "2GiB"},
            "no setting is called 'hosts_capacity'; did you mean 'host_capacity'",
        ),
        ({"host_capacity": "lots"}, "host_capacity: can't read 'lots' as a size"),
        ({"host_capacity": 2.5}, "host_capacity can't be 2.5; write for instance"),
        ({"host_capacity": 0}, "host_capacity: 0 is no room"),
        (
            {"zzz": 1},
            "known: host_capacity, lookup_deadline_s, storage, storage_capacity, warm_start, node",
        ),
        ({"disk_path": "/nvme", "disk_capacity": 0}, "disk_capacity: 0 is no room at all"),
        ({"disk_capacity": "1GiB"}, "disk_capacity: '1GiB' needs a disk; name a folder"),
        ({"disk_path": 7, "disk_capacity": "1GiB"}, "disk_path can't be 7; name a folder"),
        ({"load_policy": "never"}, "load_policy can't be 'never'; use one of auto, always"),
        ({"mode": "saves"}, "mode can't be 'saves'; use one of both, save_only, load_only"),
        ({"client_hints": "no"}, "client_hints can't be 'no'; use one of on, off"),
        ({"eviction_policy": "mru"}, "can't be 'mru'; use one of runs, lru, arc, s3fifo"),
        ({"disk_durability": "some"}, "disk_durability can't be 'some'; use one of process"),
        ({"storage": 7}, "storage can't be 7; write a URL such as"),
        ({"storage": []}, "storage can't be \\[\\]; write a URL such as"),
        ({"storage": "cache.example"}, "storage: 'cache.example' names no plug-in; write it as"),
        ({"storage": "disk=valkey://a", **DISK}, "two tiers are called 'disk'"),
        ({"storage": "valkey://a", "storage_capacity": 0}, "storage_capacity: 0 is no room at all"),
        (
            {"storage": "s3://bucket", "warm_start": "1GiB"},
            "kv_connector_extra_config: warm_start: there is no directory in front",
        ),
        ({"lookup_deadline_s": "1"}, "lookup_deadline_s can't be '1'; write a number"),
        ({"lookup_deadline_s": True}, "lookup_deadline_s can't be True; write a number"),
        ({"grid": -1}, "grid: -1 is below 0"),
        ({"grid": "512"}, "grid can't be '512'; write a number"),
        ({"lookup_deadline_s": -1}, "lookup_deadline_s: -1 is below 0"),
        ({"audit": 2}, "audit: 2 is no share of hits"),
        ({"record": True}, "record can't be True; name a file"),
        ({"record_max_bytes": "1KiB"}, "record_max_bytes: '1KiB' is below 1 MiB"),
    ):
        with pytest.raises(ConfigError, match=told):
            VllmSettings.read(extra)


@pytest.mark.parametrize(
    ("extra", "policy"),
    [
        ({}, "recompute"),
        ({"mode": "load_only"}, "recompute"),
        ({"mode": "save_only"}, "fail"),
        ({"recompute_failed_loads": False}, "fail"),
    ],
)
def test_failed_loads_are_computed_unless_kvtier_never_loads_or_leaves_that_to_vllm(
    extra: dict[str, object], policy: str
) -> None:
    config: Any = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy="fail")
    set_failure_policy(config)
    assert config.kv_load_failure_policy == policy


def test_stores_stand_in_the_order_given_and_are_not_shown() -> None:
    one = VllmSettings.read({"storage": "valkey://me:secret@host", "lookup_deadline_s": 1})
    assert one.stores == ["valkey://me:secret@host"]
    assert one.store_bytes == 1 << 40
    assert one.has_storage
    assert "secret" not in repr(one)
    row = ["valkey://host", "far=valkey://elsewhere"]
    assert VllmSettings.read({**DISK, "storage": row}).stores == row
    assert not VllmSettings.read({}).has_storage


def test_password_of_a_store_that_cant_be_read_is_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        VllmSettings.read({"storage": "//me:secret@host"})
    assert "secret" not in str(caught.value)


def test_no_folder_is_no_disk_whatever_the_default_capacity_is() -> None:
    assert VllmSettings.read({}).disk_bytes == 0
    assert VllmSettings.read({"disk_capacity": 0}).disk_bytes == 0
    assert VllmSettings.read({"disk_path": "/nvme"}).disk_bytes == 10 << 30
