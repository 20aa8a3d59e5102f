"""Settings from environment variables, and SGLang's options that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvtier.connectors.common.environment import (
    asked,
    naming_variables,
    settings_in_environment,
    shown,
)
from kvtier.connectors.sglang.shared.environment import add_storage
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.errors import ConfigError

Variables = Callable[..., None]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Variables:
    """Return a function that sets variables of the environment, by the names of settings."""

    def set_them(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"KVTIER_{name.upper()}", value)

    return set_them


def test_only_a_place_for_kv_asks_for_kvtier(variables: Variables) -> None:
    variables(log_format="json", disk_capacity="1GiB", audit="0.1", node_port="tcp://10.0.0.1:80")
    assert asked() == []
    variables(disk_path="/nvme", host_capacity="")
    assert asked() == ["KVTIER_DISK_PATH"]


def test_values_have_the_types_that_json_would_have(variables: Variables) -> None:
    variables(
        host_capacity="8GiB",
        disk_path="/nvme0 /nvme1",
        storage="valkey://:secret@host",
        audit="0.5",
        grid="512",
        recompute_failed_loads="off",
        encryption_key="00",
    )
    settings = settings_in_environment(VllmSettings)
    assert settings == {
        "host_capacity": "8GiB",
        "disk_path": ["/nvme0", "/nvme1"],
        "storage": "valkey://:secret@host",
        "audit": 0.5,
        "grid": 512,
        "recompute_failed_loads": False,
    }
    assert VllmSettings.read(settings).host_bytes == 8 << 30
    assert "KVTIER_STORAGE=valkey://host, KVTIER_DISK_PATH=/nvme0 /nvme1" in shown(settings)
    assert "secret" not in shown(settings)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"audit": "often"}, "KVTIER_AUDIT can't be 'often'; write a number from 0 to 1"),
        ({"audit": "2"}, "KVTIER_AUDIT: 2.0 is no share of hits; give a number from 0 to 1"),
        ({"grid": "1.5"}, "KVTIER_GRID can't be '1.5'; write a number"),
        ({"recompute_failed_loads": "no"}, "KVTIER_RECOMPUTE_FAILED_LOADS can't be 'no'; use true"),
        ({"host_capacity": "lots"}, "KVTIER_HOST_CAPACITY: can't read 'lots' as a size"),
        ({"disk_capacity": "1GiB"}, "KVTIER_DISK_CAPACITY: '1GiB' needs a disk"),
        ({"load_policy": "never"}, "KVTIER_LOAD_POLICY can't be 'never'; use one of auto, always"),
    ],
)
def test_a_value_is_refused_by_the_name_of_its_variable(
    variables: Variables, values: dict[str, str], sentence: str
) -> None:
    variables(**values)
    with pytest.raises(ConfigError) as raised, naming_variables(VllmSettings):
        VllmSettings.read(settings_in_environment(VllmSettings))
    assert str(raised.value).startswith(sentence)


def _server_args(**given: object) -> SimpleNamespace:
    fields = {
        "disable_radix_cache": False,
        "enable_hierarchical_cache": False,
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
        "enable_unified_cache_external_linker": False,
        "unified_cache_external_linker_backend": "mooncake",
        "unified_cache_external_linker_config": None,
    }
    return SimpleNamespace(**{**fields, **given})


def test_sglang_gets_the_linker_with_host_memory_and_else_the_storage_back_end(
    variables: Variables,
) -> None:
    variables(disk_path="/nvme", disk_capacity="1GiB")
    below = _server_args(enable_hierarchical_cache=True)
    add_storage(below)
    assert below.hicache_storage_backend == "dynamic"
    assert '"disk_path":"/nvme"' in below.hicache_storage_backend_extra_config
    assert below.unified_cache_external_linker_config is None
    variables(host_capacity="1GiB")
    linked = _server_args()
    add_storage(linked)
    add_storage(linked)  # one process may derive its options twice
    assert linked.enable_unified_cache_external_linker
    settings = linked.unified_cache_external_linker_config["linker_extra_config"]
    assert settings == {"host_capacity": "1GiB", "disk_path": "/nvme", "disk_capacity": "1GiB"}
    assert linked.hicache_storage_backend is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hicache_storage_backend": "file"}, "can't be combined with --hicache-storage-backend"),
        ({"enable_hierarchical_cache": True}, "can't be combined with --enable-hierarchical-cache"),
        ({"disable_radix_cache": True}, "can't be combined with --disable-radix-cache"),
        ({"enable_lmcache": True}, "can't be combined with --enable-lmcache"),
    ],
)
def test_sglang_is_refused_what_excludes_kvtier(
    variables: Variables, given: dict[str, object], sentence: str
) -> None:
    args = _server_args(**given)
    before = vars(args).copy()
    add_storage(args)
    assert vars(args) == before
    variables(host_capacity="1GiB")
    with pytest.raises(ConfigError, match=f"KVTIER_HOST_CAPACITY in the environment.*{sentence}"):
        add_storage(args)


def test_an_sglang_without_a_linker_is_told_what_to_leave_out(variables: Variables) -> None:
    args = _server_args()
    del args.enable_unified_cache_external_linker
    variables(host_capacity="1GiB")
    with pytest.raises(ConfigError, match=r"needs SGLang 0\.5\.23"):
        add_storage(args)
