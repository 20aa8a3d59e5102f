"""Settings of kvtier among vLLM's secondary tiers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.vllm.standalone.settings import TierSettings
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import Durability, Verify

LEAST: dict[str, Any] = {"disk_path": "/nvme/kvtier", "disk_capacity": "200GiB"}


def test_path_and_capacity_are_enough() -> None:
    options = TierSettings.read(LEAST).disk_options()
    assert options.path == Path("/nvme/kvtier")
    assert options.capacity_bytes == 200 << 30
    assert (options.durability, options.verify) == (Durability.PROCESS, Verify.ALWAYS)


def test_a_tier_sees_too_little_to_record() -> None:
    with pytest.raises(ConfigError, match="record stands beside secondary_tiers"):
        TierSettings.read({**LEAST, "record": "/log/trace"})


def test_what_users_of_the_disk_tier_need_can_be_set() -> None:
    settings = TierSettings.read(
        {
            **LEAST,
            "type": "kvtier",
            "disk_path": ["/nvme0", "/nvme1"],
            "disk_durability": "power",
            "disk_verify": "sampled",
            "disk_bytes_per_day": "2TiB",
        }
    )
    options = settings.disk_options("dp1")
    assert options.path == Path("/nvme0/dp1")
    assert options.more_paths == (Path("/nvme1/dp1"),)
    assert (options.durability, options.verify) == (Durability.POWER, Verify.SAMPLED)
    assert settings.bytes_per_day == 2 << 40


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"root_dir": "/nvme"}, "no setting is called 'root_dir'"),
        ({"audit": 0.5}, "no setting is called 'audit'"),
        ({"disk_path": ["/a", 5]}, "name a folder"),
        ({"disk_path": []}, "name a folder"),
        ({"disk_path": ["/a", "/a"]}, "named twice"),
        ({"disk_capacity": True}, "disk_capacity can't be True; write for instance"),
        ({"disk_verify": "no"}, "use one of always, sampled, off"),
        ({"disk_bytes_per_day": -1}, "disk_bytes_per_day: -1 is below 0"),
        ({"namespace": 7}, "namespace can't be 7"),
        ({"enable_kv_events": "yes"}, "use true or false"),
        ({"locality": "here"}, "use LOCAL or REMOTE"),
    ],
)
def test_what_can_not_be_used_is_refused_in_a_sentence(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TierSettings.read({**LEAST, **changed})


@pytest.mark.parametrize("name", ["path", "capacity", "durability", "verify", "bytes_per_day"])
def test_settings_are_called_as_everywhere_in_kvtier(name: str) -> None:
    assert f"disk_{name}" in {field.name for field in fields(CacheConfig)}
    with pytest.raises(ConfigError, match=f"did you mean 'disk_{name}'"):
        TierSettings.read({**LEAST, name: "1"})


def test_missing_folder_is_named_and_the_capacity_has_a_default() -> None:
    with pytest.raises(ConfigError, match="disk_path is missing; write"):
        TierSettings.read({})
    assert TierSettings.read({"disk_path": "/nvme"}).disk_bytes == 10 << 30
