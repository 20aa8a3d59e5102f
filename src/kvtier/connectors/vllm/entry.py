"""Entry point that vLLM imports by name. It checks the contract first.

If vLLM differs from the contract, the error names each difference. A process whose configuration
does not name kvtier pays nothing for an installed kvtier.
"""

from __future__ import annotations

from importlib import import_module

from kvtier.connectors.vllm.grid import contract as grid
from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract
from kvtier.core.errors import ConfigError


def __getattr__(name: str) -> object:
    """Return a class that vLLM was given by name.

    Raises ``ConfigError`` with all differences from the vLLM that kvtier knows.
    """
    found: object
    if name == "KvtierConnector":
        kv_connector.VLLM.require()
        folder = kv_connector.VLLM.installed()
        if folder is not None and (why := kv_connector.refused_runner(folder)):
            raise ConfigError(f"kvtier can't serve this vLLM: {why}")
        found = import_module("kvtier.connectors.vllm.kv_connector.connector").KvtierConnector
    elif name == "KvtierSpec":
        contract.VLLM.require()
        found = import_module("kvtier.connectors.vllm.offloading.spec").KvtierSpec
    elif name == "GridScheduler":
        grid.VLLM.require()
        found = import_module("kvtier.connectors.vllm.grid.scheduler").GridScheduler
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # MultiConnector asks for a class with every statistics
    return found
