"""kvtier's two connectors for vLLM, and the choice between them for the installed version.

Both use the same tiers and decisions. The OffloadingConnector is preferred: with it vLLM decides
which blocks to store, also for hybrid models. ``KvtierConnector`` relies on fewer parts of vLLM, so
it serves older versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.connectors.common.contract import Contract, version_of
from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract as offloading
from kvtier.connectors.vllm.shared.registry import CONNECTOR_NAME, OWN_NAME, SPEC_NAME
from kvtier.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Front:
    """One of kvtier's connectors for vLLM.

    Attributes:
        connector: Name of the connector in ``--kv-transfer-config``.
        contract: Parts of vLLM that it relies on.
        config: Further fields of ``--kv-transfer-config``.
        extra: Fields of ``kv_connector_extra_config``.
    """

    connector: str
    contract: Contract
    config: Mapping[str, str]
    extra: Mapping[str, str]


OFFLOADING = Front(CONNECTOR_NAME, offloading.VLLM, {}, {"spec_name": SPEC_NAME})
OWN = Front(
    OWN_NAME,
    kv_connector.VLLM,
    {"kv_connector_module_path": "kvtier.connectors.vllm.entry"},
    {},
)
FRONTS = (OFFLOADING, OWN)


@dataclass(frozen=True, slots=True)
class Choice:
    """The front for one vLLM.

    Attributes:
        front: None if kvtier can't serve it.
        version: of vLLM; empty if none is installed.
        why: why another front, or none, is the one; empty for the first front.
    """

    front: Front | None
    version: str = ""
    why: str = ""


def choose(folder: Path | None = None) -> Choice:
    """Return the front that serves a vLLM. folder: of its package; the one installed if None.

    Without any vLLM the first front is returned: the options may be for another machine.
    """
    folder = folder or offloading.VLLM.installed()
    if folder is None:
        return Choice(OFFLOADING)
    version = version_of(folder)
    whys: list[str] = []
    for front in FRONTS:
        found = front.contract.differences(folder)
        if not found:
            if front is OWN and (why := kv_connector.refused_runner(folder)):
                return Choice(None, version, why)
            return Choice(front, version, whys[0] if whys else "")
        first = found[0].partition(": ")[2].partition(": ")[0]
        whys.append(first if len(found) == 1 else f"{first}, and {len(found) - 1} more")
    return Choice(None, version, whys[-1])


def front_named(connector: str) -> Front:
    """Return a front by its connector, or the one that fits for "auto". Raises ``ConfigError``."""
    if connector == "auto":
        chosen = choose()
        if chosen.front is None:
            raise ConfigError(f"kvtier can't serve this vLLM: {chosen.why}")
        return chosen.front
    for front in FRONTS:
        if front.connector == connector:
            return front
    names = ", ".join(each.connector for each in FRONTS)
    raise ConfigError(f"connector: {connector!r} is none of auto, {names}")


def transfer_config(front: Front, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of ``--kv-transfer-config`` that enable kvtier.

    Raises ``ConfigError`` for settings that vLLM would be refused at its start.
    """
    from kvtier.connectors.vllm.shared.settings import VllmSettings  # loads the index's core

    extra: dict[str, object] = {**front.extra, **settings}
    if "node" in settings:
        extra.pop("host_capacity", None)  # the node's memory is used instead
    VllmSettings.read(extra)
    return {
        "kv_connector": front.connector,
        **front.config,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
