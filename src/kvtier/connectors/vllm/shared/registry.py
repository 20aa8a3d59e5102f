"""Connector classes for the vLLM configurations that name kvtier.

vLLM has one connector for all offloading specs, and one for several connectors. It makes both
before it reads which of them are kvtier's. ``wrap_factory`` therefore wraps the method of vLLM's
factory that finds the class for a configuration. For a configuration that names kvtier, the method
returns a class derived from the one that the factory has found: vLLM's, or that of a platform's
plug-in such as vllm-ascend. For every other configuration its result is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any, NoReturn

from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract

CONNECTOR_NAME = "OffloadingConnector"
"""Name of the connector in vLLM's table. Classes made here have it, too: under MultiConnector vLLM
files the statistics of a connector by the name of its class, and looks that up in the table."""
MULTI_NAME = "MultiConnector"
OWN_NAME = "KvtierConnector"
"""Class of kvtier's own connector, in ``kv_connector/``."""
SPEC_NAME = "kvtier"
"""Name of kvtier's offloading spec, of its secondary tier, and of its eviction policy."""
FINDERS = ("_get_connector_class_with_compat", "get_connector_class")
"""Method of vLLM's factory by which all others find a configuration's class. The first is there
before vLLM 0.23, and returns the class with a flag."""


def wrap_factory(factory: Any) -> None:
    """Make vLLM's ``KVConnectorFactory`` return kvtier's classes where kvtier is configured.

    A second call does nothing, since one process may load its plug-ins twice.
    """
    finder = next((name for name in FINDERS if hasattr(factory, name)), FINDERS[-1])
    find = getattr(factory, finder)
    if hasattr(find, "__wrapped__"):
        return

    @wraps(find.__func__)
    def find_class(cls: Any, kv_transfer_config: Any) -> Any:
        name, kind = kv_transfer_config.kv_connector, None
        if not getattr(kv_transfer_config, "kv_connector_module_path", None):
            kind = {CONNECTOR_NAME: offloading_class, MULTI_NAME: multi_class}.get(name)
        if kind is None or not asks_for_kvtier(name, kv_transfer_config.kv_connector_extra_config):
            return find(kv_transfer_config)
        try:
            found = find(kv_transfer_config)
        except ImportError as error:  # a platform's, for another version of vLLM
            if kind is multi_class or contract.VLLM.differences():
                raise
            broken = broken_class(error)
            # MultiConnector looks it up by name, too.
            vars(factory)["_registry"][name] = lambda: broken
            return find(kv_transfer_config)
        return (kind(found[0]), *found[1:]) if isinstance(found, tuple) else kind(found)

    setattr(factory, finder, classmethod(find_class))


def asks_for_kvtier(name: str | None, extra: Mapping[str, Any] | None, module: str = "") -> bool:
    """Whether a connector, or one inside it, uses a part of kvtier.

    The arguments are fields of its configuration, ``kv_connector`` and so on.
    """
    extra = extra or {}
    if name == OWN_NAME or _is_kvtiers(module):
        return True
    if module:
        return _derives_from_kvtiers(name, module)
    if name == MULTI_NAME:
        return any(
            asks_for_kvtier(
                inside.get("kv_connector"),
                inside.get("kv_connector_extra_config"),
                inside.get("kv_connector_module_path") or "",
            )
            for inside in extra.get("connectors") or ()
        )
    if name != CONNECTOR_NAME:
        return False
    tiers = extra.get("secondary_tiers") or ()
    return (
        extra.get("spec_name") == SPEC_NAME
        or "record" in extra
        or any(tier.get("type") == SPEC_NAME for tier in tiers)
        or any(_is_kvtiers(tier.get("module_path") or "") for tier in tiers)
        or _derives_from_kvtiers(extra.get("spec_name"), extra.get("spec_module_path"))
    )


def _is_kvtiers(module: str) -> bool:
    return module.partition(".")[0] == SPEC_NAME


def _derives_from_kvtiers(name: str | None, module: str | None) -> bool:
    """Whether a class that vLLM imports from ``module`` is derived from one of kvtier's."""
    if name is None or module is None:
        return False
    try:
        kind = getattr(import_module(module), name)
    except Exception:  # vLLM meets it next, and reports it
        return False
    return any(_is_kvtiers(base.__module__) for base in kind.__mro__)


@cache
def offloading_class(theirs: type) -> type:
    """Return kvtier's OffloadingConnector, derived from ``theirs``.

    A vLLM that kvtier can't serve keeps its own.
    """
    if contract.VLLM.differences():
        return theirs
    from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector as Ours

    if issubclass(theirs, Ours):
        return theirs
    if issubclass(Ours, theirs):
        return Ours
    return type(CONNECTOR_NAME, (Ours, theirs), {"theirs": theirs})


@cache
def multi_class(theirs: type) -> type:
    """Return vLLM's MultiConnector with the failure policy that kvtier inside it needs."""
    ours: type
    if not contract.VLLM.differences():
        from kvtier.connectors.vllm.offloading.multi import KvtierMultiConnector

        ours = KvtierMultiConnector
    elif not kv_connector.VLLM.differences():
        from kvtier.connectors.vllm.shared.multi import RecomputingMulti

        ours = RecomputingMulti
    else:
        return theirs
    return type(MULTI_NAME, (ours,) if issubclass(ours, theirs) else (ours, theirs), {})


def broken_class(error: ImportError) -> type:
    """Return kvtier's OffloadingConnector over vLLM's own, where a platform's can't be imported.

    A configuration of another spec gets ``error``.
    """
    from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector

    def refuse(*_: object) -> NoReturn:
        raise error

    return type(CONNECTOR_NAME, (KvtierOffloadingConnector,), {"theirs": staticmethod(refuse)})
