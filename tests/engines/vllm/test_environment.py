"""A vLLM whose environment asks for kvtier, without any option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from kvtier.connectors.vllm.shared.environment import wrap_engine_args
from kvtier.connectors.vllm.shared.fronts import front_named
from kvtier.core.errors import ConfigError
from tests.engines.vllm.engines import BLOCK, MODEL, multi, prompt
from tests.engines.vllm.servers import VllmServer
from tests.kit.waiting import wait_until


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Wrap vLLM's ``EngineArgs`` for one test, and ask for kvtier."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    wrap_engine_args(EngineArgs)
    monkeypatch.setenv("KVTIER_HOST_CAPACITY", "64MiB")
    return monkeypatch


def _config(**options: Any) -> VllmConfig:
    options = {"model": str(MODEL), "dtype": "float32", "max_model_len": 4096, **options}
    return AsyncEngineArgs(**options).create_engine_config()


def test_the_connector_that_fits_is_added(asks: pytest.MonkeyPatch) -> None:
    asks.setenv("KVTIER_AUDIT", "0.5")
    config = _config().kv_transfer_config
    front = front_named("auto")
    assert config.kv_connector == front.connector
    assert config.kv_connector_extra_config == {
        **front.extra,
        "host_capacity": "64MiB",
        "audit": 0.5,
    }


def test_a_configuration_that_names_kvtier_is_left_as_it_is(asks: pytest.MonkeyPatch) -> None:
    extra = {"spec_name": "kvtier", "host_capacity": "32MiB"}
    own = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    for given in (own, multi(own)):
        config = _config(kv_transfer_config=KVTransferConfig(**given)).kv_transfer_config
        assert config.kv_connector == given["kv_connector"]
        assert config.kv_connector_extra_config == given["kv_connector_extra_config"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="ExampleConnector", kv_role="kv_both"
                )
            },
            "--kv-transfer-config for ExampleConnector: leave one of them out, or name both",
        ),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size for vLLM's own offloading: leave one"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching for no reuse of KV: leave"),
    ],
)
def test_options_that_exclude_kvtier_are_refused(
    asks: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        _config(**options)
    assert "KVTIER_HOST_CAPACITY in the environment" in str(raised.value)


def test_a_bad_value_is_refused_by_the_name_of_its_variable(asks: pytest.MonkeyPatch) -> None:
    asks.setenv("KVTIER_HOST_CAPACITY", "lots")
    with pytest.raises(ConfigError, match="^KVTIER_HOST_CAPACITY: can't read 'lots' as a size"):
        _config()


@pytest.mark.timeout(900)
def test_a_server_finds_after_a_restart_what_it_has_stored(tmp_path: Path) -> None:
    slab = tmp_path / "slab"
    variables = {
        "KVTIER_DISK_PATH": str(slab),
        "KVTIER_DISK_CAPACITY": "64MiB",
        "KVTIER_LOAD_POLICY": "always",
    }
    server = VllmServer(tmp_path, variables=variables)
    tokens = prompt(1, 6 * BLOCK + 50)["prompt_token_ids"]
    answers = []
    try:
        for _ in range(2):
            server.start()
            server.wait()
            answers.append(server.ask(tokens))
            wait_until(
                lambda: sum(path.stat().st_size for path in slab.rglob("journal")) >= 64 * 6,
                "the blocks are on disk",
            )
            server.kill()
    finally:
        server.stop()
    first, second = answers
    assert (first.num_cached, second.num_cached) == (0, 6 * BLOCK)
    assert first.answer[0] == second.answer[0], "the tokens; the first was computed in one piece"
    line = f"as the environment asks: KVTIER_DISK_PATH={slab}, KVTIER_DISK_CAPACITY=64MiB"
    assert server.log.count(line) == 2, "one line per start"
