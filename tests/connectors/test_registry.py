"""The table of connectors, without a vLLM."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvtier.connectors.common.contract import Contract
from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract
from kvtier.connectors.vllm.registry import MULTI_NAME, Connectors, InPlaceOf


class Theirs:
    """A platform's connector."""


class Ours:
    theirs: type = Theirs

    def __new__(cls, *arguments: object) -> Any:
        return cls.theirs(*arguments)


def _over(theirs: type) -> type:
    return type("Over", (Ours, theirs), {"theirs": theirs})


def _missing() -> type:
    raise ImportError("no such name in this vLLM")


@pytest.fixture(autouse=True)
def _connector(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvtier.connectors.vllm.offloading.connector")
    module.__dict__.update(KvtierOffloadingConnector=Ours, over=_over)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: [])


@pytest.mark.parametrize("is_first", [True, False])
def test_order_of_plug_ins_does_not_matter(is_first: bool) -> None:
    table: dict[str, object] = {"name": lambda: object, "other": lambda: object}
    if is_first:
        table.pop("name")
        table["name"] = lambda: Theirs
    connectors = Connectors(table, "name")  # type: ignore[arg-type]
    if not is_first:
        connectors.pop("name")
        assert "name" not in connectors
        connectors["name"] = lambda: Theirs
    found = connectors["name"]()
    assert issubclass(found, Ours)
    assert issubclass(found, Theirs)
    assert connectors["other"]() is object


def test_table_that_is_made_twice_has_ours_once() -> None:
    connectors = Connectors(Connectors({"name": lambda: Theirs}, "name"), "name")
    assert connectors["name"]().__mro__.count(Ours) == 1
    assert isinstance(connectors["name"], InPlaceOf)


def test_vllm_that_kvtier_cannot_serve_gets_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: ["something moved"])
    assert Connectors({"name": lambda: Theirs}, "name")["name"]() is Theirs


def test_connector_of_theirs_that_cannot_be_imported_is_missed_only_by_who_wants_it() -> None:
    found = Connectors({"name": _missing}, "name")["name"]()
    assert issubclass(found, Ours)
    with pytest.raises(ImportError, match="no such name in this vLLM"):
        found()


def test_multi_connector_of_vllm_is_ours_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("kvtier.connectors.vllm.offloading.multi")
    module.__dict__.update(over_offloading=_over)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    connectors = Connectors({MULTI_NAME: lambda: Theirs, "name": lambda: object}, "name")
    assert issubclass(connectors[MULTI_NAME](), Theirs)
    assert issubclass(connectors[MULTI_NAME](), Ours)
    monkeypatch.setattr(type(contract.VLLM), "differences", lambda _: ["something moved"])
    connectors[MULTI_NAME] = lambda: Theirs
    assert connectors[MULTI_NAME]() is Theirs


def test_multi_connector_of_older_vllm_is_that_of_kvtiers_own_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("kvtier.connectors.vllm.multi")
    module.__dict__.update(over_multi=_over)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def differences(asked: Contract) -> list[str]:
        return [] if asked is kv_connector.VLLM else ["something moved"]

    monkeypatch.setattr(Contract, "differences", differences)
    found = Connectors({MULTI_NAME: lambda: Theirs}, "name")[MULTI_NAME]()
    assert issubclass(found, Ours)
    assert issubclass(found, Theirs)


def test_sources_of_vllm_are_compared_once_however_often_a_class_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MultiConnector looks a class up with every statistics."""
    compared: list[Contract] = []

    def differences(asked: Contract) -> list[str]:
        compared.append(asked)
        return []

    monkeypatch.setattr(Contract, "differences", differences)
    connectors = Connectors({"name": lambda: Theirs}, "name")
    assert len({connectors["name"]() for _ in range(3)}) == 1
    assert len(compared) == 1
