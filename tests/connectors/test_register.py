"""The plug-in that every vLLM process calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from kvtier.connectors.vllm import register
from kvtier.connectors.vllm.shared.registry import SPEC_NAME


class Factory:
    """Refuses to register a name twice, as vLLM's factory does."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}
        self._registry: dict[str, Callable[[], type]] = {"OffloadingConnector": lambda: dict}

    def register_spec(self, name: str, module: str, kind: str) -> None:
        if name in self.known:
            raise ValueError(f"{name} is registered")
        self.known[name] = (module, kind)

    @classmethod
    def get_connector_class(cls, config: object) -> type:
        return dict

    def register_connector(self, name: str, module: str, kind: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is registered")
        self._registry[name] = lambda: type(kind, (), {"module": module})

    register_tier = register_cache_policy = register_spec


def _vllm(monkeypatch: pytest.MonkeyPatch, **pieces: Factory) -> Factory:
    factory = Factory()
    policies = {"CachePolicyFactory": pieces["policies"]} if pieces else {}
    tiers = {"SecondaryTierFactory": pieces["tiers"]} if pieces else {}
    for name, content in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": factory},
        "vllm.v1": {},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.factory": {"OffloadingSpecFactory": factory},
        "vllm.v1.kv_offload.cpu": {},
        "vllm.v1.kv_offload.cpu.policies": {},
        "vllm.v1.kv_offload.cpu.policies.factory": policies,
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.backpressure": {"BackpressureDetector": factory},
        "vllm.v1.kv_offload.tiering.factory": tiers,
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return factory


def test_spec_is_known_by_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = _vllm(monkeypatch)
    register()
    register()
    assert factory.known == {SPEC_NAME: ("kvtier.connectors.vllm.entry", "KvtierSpec")}
    assert factory._registry["OffloadingConnector"]() is dict
    own = factory._registry["KvtierConnector"]()
    assert own.__name__ == "KvtierConnector"
    assert own.module == "kvtier.connectors.vllm.entry"  # type: ignore[attr-defined]


def test_tier_and_policy_alone_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, policies = Factory(), Factory()
    _vllm(monkeypatch, tiers=tiers, policies=policies)
    register()
    register()
    assert tiers.known == {SPEC_NAME: ("kvtier.connectors.vllm.standalone.secondary", "KvtierTier")}
    assert policies.known == {
        SPEC_NAME: ("kvtier.connectors.vllm.standalone.policy", "KvtierPolicy")
    }


def test_another_vllm_is_told_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _vllm(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.factory", ModuleType("nothing in it"))
    register()
    assert "kvtier can't be used by this vLLM: made for 0.30 to 0.33" in caplog.text
    assert "OffloadingSpecFactory" in caplog.text


@pytest.mark.parametrize("is_asked", [False, True])
def test_engine_args_are_wrapped_only_if_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_asked: bool
) -> None:
    class EngineArgs:
        def create_engine_config(self) -> str:
            return "vLLM's"

    created = EngineArgs.create_engine_config
    _vllm(monkeypatch)
    for name in ("vllm.engine", "vllm.engine.arg_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm.engine.arg_utils"])["EngineArgs"] = EngineArgs
    monkeypatch.setenv("KVTIER_DISK_CAPACITY", "1GiB")
    if is_asked:
        monkeypatch.setenv("KVTIER_DISK_PATH", "/nvme")
    register()
    register()
    wrapped = EngineArgs.create_engine_config
    assert (wrapped is not created) == is_asked
    if is_asked:
        assert vars(wrapped)["__wrapped__"] is created, "wrapped once"
    assert "can't be used" not in caplog.text
