"""Settings under SGLang, unsupported options, and names of pages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.sglang.shared.identity import engine_digest, page_keys, pool_facts
from kvtier.connectors.sglang.shared.ranks import folder_of
from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings
from kvtier.connectors.sglang.shared.unsupported import refuse
from kvtier.core.errors import ConfigError

DISK = {"disk_path": "/nvme/kv", "disk_capacity": "1MiB"}


def config(**changes: object) -> Any:
    """Return the config that SGLang passes to a single rank."""
    known = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "model_name": "m"}
    known |= {"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_size": 1, "is_mla_model": False}
    return SimpleNamespace(**{**known, "extra_config": None, **changes})


def test_settings_are_read_and_sglangs_own_are_left_to_it() -> None:
    own = {"backend_name": "kvtier", "interface_v1": 1, "prefetch_threshold": 64}
    found = StorageSettings.read({**DISK, **own, "hold_s": 5})
    assert (found.disk_bytes, found.hold_s, found.load_policy) == (1 << 20, 5, "auto")


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, "there is neither disk_path nor storage; name one"),
        ({**DISK, "storage": "valkey://host"}, "exclude each other"),
        ({**DISK, "disk_pth": "x"}, "no setting is called 'disk_pth'; did you mean 'disk_path'?"),
        ({**DISK, "zzz": 1}, "no setting is called 'zzz'; known: storage"),
        ({**DISK, "disk_path": 1}, "disk_path can't be 1; name a folder"),
        ({**DISK, "disk_capacity": "plenty"}, "can't read 'plenty' as a size"),
        ({**DISK, "disk_capacity": 0}, "disk_capacity: 0 is no room at all"),
        (
            {"storage": "s3://bucket", "warm_start": "1GiB"},
            "warm_start: there is one store here, and it copies from one into another; run kvtier",
        ),
        ({**DISK, "hold_s": "5"}, "hold_s can't be '5'; write a number"),
        ({**DISK, "load_policy": "never"}, "load_policy can't be 'never'; use one of auto, always"),
    ],
)
def test_setting_that_cant_be_used_is_one_sentence(extra: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StorageSettings.read(extra)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"dcp_size": 2}, {}, "decode context parallelism of 2"),
        ({"is_mla_model": True}, {"nnodes": 2}, "an MLA model on 2 machines"),
        ({}, {"enable_lora": True}, "adapters"),
    ],
)
def test_engine_that_cant_be_served_is_one_sentence(
    changes: dict[str, object], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        refuse(config(**changes), SimpleNamespace(**options), StorageSettings.read(DISK))


def test_stages_of_a_pipeline_are_not_linked() -> None:
    memory = LinkerSettings.read({"host_capacity": "1GiB"})
    with pytest.raises(ConfigError, match="pipeline parallelism of 2"):
        refuse(config(pp_size=2), None, memory)
    refuse(config(), None, memory)
    refuse(config(pp_size=2), None, StorageSettings.read(DISK))


def test_adapters_are_served_from_memory_alone() -> None:
    adapters = SimpleNamespace(enable_lora=True)
    refuse(config(), adapters, LinkerSettings.read({"host_capacity": "1GiB"}))
    with pytest.raises(ConfigError, match="adapters"):
        refuse(config(), adapters, LinkerSettings.read({"host_capacity": "1GiB", **DISK}))


@pytest.mark.parametrize("kind", ["is_multimodal", "is_audio_model"])
def test_media_are_served_from_memory_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Their hash in SGLang's keys is one that a client can choose."""
    found = SimpleNamespace(is_multimodal=False, is_audio_model=False)
    module = ModuleType("sglang.srt.configs.model_config")
    module.ModelConfig = SimpleNamespace(from_server_args=lambda options: found)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    options = SimpleNamespace(model_path="/models/seeing")
    refuse(config(), options, StorageSettings.read(DISK))
    setattr(found, kind, True)
    with pytest.raises(ConfigError, match="mm_hashes"):
        refuse(config(), options, StorageSettings.read(DISK))
    refuse(config(), options, StorageSettings.read({**DISK, "namespace": "hashes are content"}))
    refuse(config(), options, LinkerSettings.read({"host_capacity": "1GiB"}))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"host_capacity": 0}, "host_capacity: 0 is no room at all"),
        ({"hold_s": 5}, "no setting is called 'hold_s'"),
        ({"disk_capacity": "1GiB"}, "disk_capacity: '1GiB' needs a disk"),
    ],
)
def test_linkers_setting_that_cant_be_used_is_one_sentence(
    given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LinkerSettings.read(given)


def test_several_disks_cut_each_page() -> None:
    given = StorageSettings.read({**DISK, "disk_path": ["/a", "/b"]})
    options = given.disk_options("rank0-kv", 4096)
    assert [str(options.path), *map(str, options.more_paths)] == ["/a/rank0-kv", "/b/rank0-kv"]
    assert options.capacity_bytes == 4096


def test_who_vouches_for_adapters_is_served() -> None:
    given = StorageSettings.read({**DISK, "namespace": "adapters of May"})
    refuse(config(), SimpleNamespace(enable_lora=True), given)
    refuse(config(), None, StorageSettings.read(DISK))


def test_keys_are_32_bytes_and_all_different() -> None:
    keys = ["ab" * 32, "cd" * 32, "xy" * 32, "ab" * 31, "a name"]
    assert page_keys(keys[:2]) == [bytes.fromhex(key) for key in keys[:2]]
    assert page_keys([]) == []
    blanks = ["ab" * 31 + "  ", "  " + "ab" * 31, "ab" * 32 + " "]
    keys += blanks
    found = set(page_keys(keys))
    assert found == {page_keys([key])[0] for key in keys}
    assert len(found) == len(keys)
    assert {len(each) for each in found} == {32}


def test_ranks_pools_and_replicas_have_folders_of_their_own() -> None:
    assert folder_of(config(), "kv") == "rank0-kv"
    rank = {"tp_rank": 1, "tp_size": 2}
    assert folder_of(config(**rank), "swa") == "tp1-swa"
    assert folder_of(config(**rank, is_mla_model=True), "kv") == "tp0-kv"
    assert folder_of(config(**rank, is_mla_model=True), "mamba") == "tp1-mamba"
    assert folder_of(config(**rank, pp_rank=1, pp_size=2, dp_rank=3), "kv") == "dp3-pp1-tp1-kv"
    assert folder_of(config(), "kv", replica=2) == "replica2-kv"


def test_whatever_decides_on_bytes_is_another_namespace() -> None:
    def pool(**changes: object) -> object:
        known = {"dtype": "bf16", "layout": "page_first", "page_size": 64, "layer_num": 2}
        return SimpleNamespace(**{**known, **changes})

    facts = [
        pool_facts(config(), "kv", pool(), [4096, 4096]),
        pool_facts(config(), "swa", pool(), [4096, 4096]),
        pool_facts(config(), "kv", pool(), [8192]),
        pool_facts(config(), "kv", pool(dtype="fp16"), [4096, 4096]),
        pool_facts(config(), "kv", pool(layout="layer_first"), [4096, 4096]),
        pool_facts(config(), "kv", pool(storage_format_tag="x"), [4096, 4096]),
        pool_facts(config(tp_rank=1, tp_size=2), "kv", pool(), [4096, 4096]),
        pool_facts(config(tp_size=2), "kv", pool(), [4096, 4096]),
    ]
    assert len(set(facts)) == len(facts)
    ranks = [config(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)]
    assert len({pool_facts(rank, "kv", pool(), [1]) for rank in ranks}) == 1
    engines = [
        engine_digest("w", "0.5.23", None, ""),
        engine_digest("v", "0.5.23", None, ""),
        engine_digest("w", "0.5.22", None, ""),
        engine_digest("w", "0.5.23", SimpleNamespace(kv_cache_dtype="fp8_e4m3"), ""),
        engine_digest("w", "0.5.23", None, "salt"),
    ]
    assert len(set(engines)) == len(engines)
