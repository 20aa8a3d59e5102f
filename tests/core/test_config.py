"""Settings: sizes, capacities, and sentences that say what to change."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.connectors.vllm.standalone.settings import TierSettings
from kvtier.core.config import UNITS, CacheConfig, parse_capacity, parse_size
from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.types import WritePolicy
from kvtier.node.config import NodeConfig


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5KiB", 1536),
        (".5 kB", 500),
        ("2TB", 2 * 10**12),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text, "field") == nbytes
    assert parse_capacity(text, 1, "field") == nbytes


@given(st.integers(0, 2**40), st.sampled_from(sorted(UNITS)))
def test_sizes_in_every_unit_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number} {unit}", "field") == number * UNITS[unit]


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 apples", "-1", "4 GiB 2", "1e9", "0x10", "2x", "nan"]
)
def test_unreadable_size_names_field_value_and_fix(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "host_capacity")
    for part in ("host_capacity", repr(text), "4GiB"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("text", "nbytes"), [("2x", 2000), ("0.5 X", 500), (" 10x ", 10_000)])
def test_capacity_may_be_a_multiple_of_the_device_pool(text: str, nbytes: int) -> None:
    assert parse_capacity(text, 1000, "host_capacity") == nbytes


def test_config_errors_are_value_errors_too() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, CacheError)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"write_policy": "write_never"}, ("write_policy", "'write_never'", "write_back")),
        ({"host_capacity": -1}, ("host_capacity", "-1", "below 0", "4GiB")),
        ({"host_capacity": 1.5}, ("host_capacity", "1.5", "4GiB")),
        ({"host_capacity": None}, ("host_capacity", "None", "4GiB")),
        ({"host_capacity": True}, ("host_capacity", "True", "4GiB")),
        ({"disk_capacity": -1}, ("disk_capacity", "-1", "below 0")),
        ({"storage_capacity": -1}, ("storage_capacity", "-1", "below 0")),
        ({"disk_bytes_per_s": -1}, ("disk_bytes_per_s", "-1", "below 0")),
        ({"store_after_uses": 0}, ("store_after_uses", "0")),
        ({"store_batch_bytes": -1}, ("store_batch_bytes", "-1")),
        ({"load_deadline_s": 0.0}, ("load_deadline_s", "0.0")),
        ({"load_deadline_s": float("nan")}, ("load_deadline_s", "nan")),
    ],
)
def test_unusable_setting_is_named(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


def test_write_policy_may_be_given_by_its_name() -> None:
    """Command lines and files give strings; the cache compares members."""
    config = CacheConfig(write_policy="write_back")  # type: ignore[arg-type]
    assert config.write_policy is WritePolicy.WRITE_BACK


def test_setting_has_one_meaning_and_one_default_in_every_use() -> None:
    """Only the defaults for host memory and for direct reads differ between uses."""
    kinds = (CacheConfig, VllmSettings, LinkerSettings, StorageSettings, TierSettings, NodeConfig)
    defaults: dict[str, set[object]] = {}
    for kind in kinds:
        for field in fields(kind):
            if field.name not in ("quotas", "tenant_users", "events"):
                assert field.metadata["meaning"], field.name
                defaults.setdefault(field.name, set()).add(field.default)
    different = {name for name, found in defaults.items() if len(found) > 1}
    assert different == {"host_capacity", "disk_direct"}
