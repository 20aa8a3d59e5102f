"""Classes for vLLM's configurations, by a factory like vLLM's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kvtier.connectors.common.contract import Contract
from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract
from kvtier.connectors.vllm.shared.registry import (
    CONNECTOR_NAME,
    MULTI_NAME,
    asks_for_kvtier,
    multi_class,
    offloading_class,
    wrap_factory,
)


class Theirs:
    """A connector of vLLM or of a platform."""


class Ours:
    theirs: Any = Theirs

    def __new__(cls, *arguments: object) -> Any:
        return cls.theirs(*arguments)


@dataclass
class Config:
    """Stand-in for vLLM's ``KVTransferConfig``."""

    kv_connector: str = CONNECTOR_NAME
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None


ASKING = Config(kv_connector_extra_config={"spec_name": "kvtier"})


def _missing() -> type:
    raise ImportError("no such name in this vLLM")


@pytest.fixture(autouse=True)
def _connector(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, object]] = {
        "offloading.connector": {"KvtierOffloadingConnector": Ours},
        "offloading.multi": {"KvtierMultiConnector": Ours},
        "shared.multi": {"RecomputingMulti": Ours},
    }
    for name, content in modules.items():
        module = ModuleType(f"kvtier.connectors.vllm.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: [])
    offloading_class.cache_clear()
    multi_class.cache_clear()


@pytest.fixture(params=["get_connector_class", "_get_connector_class_with_compat"])
def factory(request: pytest.FixtureRequest) -> Any:
    """A factory of a new vLLM, and one of an old vLLM."""

    class Factory:
        _registry: ClassVar[dict[str, Any]] = {
            CONNECTOR_NAME: lambda: Theirs,
            MULTI_NAME: lambda: Theirs,
        }

        @classmethod
        def get_connector_class(cls, kv_transfer_config: Config) -> type:
            return cls._registry[kv_transfer_config.kv_connector]()

    class OldFactory(Factory):
        @classmethod
        def get_connector_class(cls, kv_transfer_config: Config) -> type:
            return cls._get_connector_class_with_compat(kv_transfer_config)[0]

        @classmethod
        def _get_connector_class_with_compat(cls, kv_transfer_config: Config) -> tuple[type, bool]:
            return cls._registry[kv_transfer_config.kv_connector](), False

    return Factory if request.param == "get_connector_class" else OldFactory


def test_configuration_that_asks_gets_kvtiers_class_over_the_one_found(factory: Any) -> None:
    wrap_factory(factory)
    found = factory.get_connector_class(ASKING)
    assert issubclass(found, Ours)
    assert issubclass(found, Theirs)
    assert factory.get_connector_class(ASKING) is found


def test_configuration_that_does_not_ask_gets_what_it_got_before(factory: Any) -> None:
    table, content = factory._registry, dict(factory._registry)
    wrap_factory(factory)
    assert factory.get_connector_class(Config()) is Theirs
    assert factory.get_connector_class(Config(MULTI_NAME)) is Theirs
    assert factory._registry is table
    assert table == content


def test_order_of_plug_ins_does_not_matter(factory: Any) -> None:
    class Platforms(Theirs):
        pass

    wrap_factory(factory)
    factory._registry[CONNECTOR_NAME] = lambda: Platforms
    assert issubclass(factory.get_connector_class(ASKING), Platforms)


def test_factory_is_wrapped_once(factory: Any) -> None:
    wrap_factory(factory)
    wrapped = factory.get_connector_class.__func__
    wrap_factory(factory)
    assert factory.get_connector_class.__func__ is wrapped
    assert factory.get_connector_class(ASKING).__mro__.count(Ours) == 1


def test_vllm_that_kvtier_cannot_serve_keeps_its_own(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: ["something moved"])
    wrap_factory(factory)
    assert factory.get_connector_class(ASKING) is Theirs


def test_platforms_connector_that_cannot_be_imported_fails_only_its_own_users(
    factory: Any,
) -> None:
    factory._registry = {CONNECTOR_NAME: _missing}
    wrap_factory(factory)
    with pytest.raises(ImportError, match="no such name in this vLLM"):
        factory.get_connector_class(Config())
    found = factory.get_connector_class(ASKING)
    assert issubclass(found, Ours)
    assert factory._registry[CONNECTOR_NAME]() is found
    with pytest.raises(ImportError, match="no such name in this vLLM"):
        found()


def test_multi_connector_is_kvtiers_only_with_kvtier_inside(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_factory(factory)
    inside = vars(ASKING) | {"kv_role": "kv_both"}
    asking = Config(MULTI_NAME, {"connectors": [vars(Config("Other")), inside]})
    assert issubclass(factory.get_connector_class(asking), Ours)
    assert factory.get_connector_class(Config(MULTI_NAME, {"connectors": [vars(Config())]})) is (
        Theirs
    )
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: ["something moved"])
    multi_class.cache_clear()
    assert factory.get_connector_class(asking) is Theirs


def test_multi_connector_of_older_vllm_is_that_of_kvtiers_own_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differences(asked: Contract) -> list[str]:
        return [] if asked is kv_connector.VLLM else ["something moved"]

    monkeypatch.setattr(Contract, "differences", differences)
    assert issubclass(multi_class(Theirs), Ours)


def test_sources_of_vllm_are_compared_once_however_often_a_class_is_looked_up(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Contract] = []

    def differences(asked: Contract) -> list[str]:
        compared.append(asked)
        return []

    monkeypatch.setattr(Contract, "differences", differences)
    wrap_factory(factory)
    assert len({factory.get_connector_class(ASKING) for _ in range(3)}) == 1
    assert len(compared) == 1


def inside(name: str, module: str) -> dict[str, Any]:
    return {"connectors": [{"kv_connector": name, "kv_connector_module_path": module}]}


NESTED = {"connectors": [{"kv_connector": MULTI_NAME, "kv_connector_extra_config": {}}]}


@pytest.mark.parametrize(
    ("name", "extra", "asks"),
    [
        (CONNECTOR_NAME, {}, False),
        (CONNECTOR_NAME, None, False),
        (CONNECTOR_NAME, {"spec_name": "TieringOffloadingSpec"}, False),
        (CONNECTOR_NAME, {"spec_name": "A", "spec_module_path": "collections"}, False),
        (CONNECTOR_NAME, {"spec_name": "OrderedDict", "spec_module_path": "collections"}, False),
        (CONNECTOR_NAME, {"secondary_tiers": [{"type": "fs"}]}, False),
        (CONNECTOR_NAME, {"spec_name": "kvtier"}, True),
        (CONNECTOR_NAME, {"spec_name": "Case", "spec_module_path": __name__}, True),
        (CONNECTOR_NAME, {"secondary_tiers": [{"type": "fs"}, {"type": "kvtier"}]}, True),
        (CONNECTOR_NAME, {"secondary_tiers": [{"module_path": "kvtier.connectors"}]}, True),
        (CONNECTOR_NAME, {"record": "/traces"}, True),
        ("NixlConnector", {"record": "/traces"}, False),
        (MULTI_NAME, NESTED, False),
        (MULTI_NAME, {"connectors": [{"kv_connector": "KvtierConnector"}]}, True),
        (MULTI_NAME, {"connectors": [{"kv_connector_module_path": "kvtier.x"}]}, True),
        (MULTI_NAME, inside("Case", __name__), True),
        (MULTI_NAME, inside("Ours", __name__), False),
        (MULTI_NAME, inside("Case", "no_such_module"), False),
    ],
)
def test_what_asks_for_kvtier(name: str, extra: dict[str, Any] | None, asks: bool) -> None:
    assert asks_for_kvtier(name, extra) == asks


class Case(Contract):
    """Class derived from one of kvtier's, as a spec of a third party may be."""
