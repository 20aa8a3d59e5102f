"""Adds kvtier to a vLLM whose environment asks for it, and whose options name no connector.

vLLM loads its plug-ins when it makes its ``EngineArgs``, and its configuration from these
afterwards. The wrapped method therefore fills in what ``--kv-transfer-config`` would have brought.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from kvtier.connectors.common.environment import (
    asked,
    naming_variables,
    settings_in_environment,
    shown,
)
from kvtier.connectors.vllm.shared.fronts import front_named, transfer_config
from kvtier.connectors.vllm.shared.grid import SCHEDULER
from kvtier.connectors.vllm.shared.registry import asks_for_kvtier
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.errors import ConfigError
from kvtier.observe.logs import log_in_engine

logger = logging.getLogger(__name__)


def wrap_engine_args(engine_args: Any) -> None:
    """Have vLLM's ``EngineArgs`` ask for kvtier. A second call does nothing."""
    create = engine_args.create_engine_config
    if getattr(create, "asks_for_kvtier", False):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        add_connector(self)
        return create(self, *args, **kwargs)

    create_engine_config.asks_for_kvtier = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def add_connector(engine_args: Any) -> None:
    """Set the connector in ``EngineArgs`` by the variables of the environment.

    A configuration that names kvtier is left as it is. Raises ``ConfigError`` for options that
    exclude kvtier, and for values that can't be read.
    """
    from vllm.config import KVTransferConfig

    log_in_engine(logging.getLogger("vllm"))
    variables = " and ".join(asked())
    given = engine_args.kv_transfer_config
    if given is not None and given.kv_connector is not None:
        module = getattr(given, "kv_connector_module_path", None) or ""
        if asks_for_kvtier(given.kv_connector, given.kv_connector_extra_config, module):
            logger.info(
                "kvtier: --kv-transfer-config has the settings, and %s does not count", variables
            )
            return
        raise ConfigError(
            f"{variables} in the environment asks for kvtier, and --kv-transfer-config for "
            f"{given.kv_connector}: leave one of them out, or name both in a MultiConnector"
        )
    if getattr(engine_args, "kv_offloading_size", None) is not None:
        raise ConfigError(
            f"{variables} in the environment asks for kvtier, and --kv-offloading-size for vLLM's "
            "own offloading: leave one of them out"
        )
    if engine_args.enable_prefix_caching is False:
        raise ConfigError(
            f"{variables} in the environment asks for kvtier, and --no-enable-prefix-caching for "
            "no reuse of KV: leave one of them out"
        )
    with naming_variables(VllmSettings):
        settings = settings_in_environment(VllmSettings)
        config = transfer_config(front_named("auto"), settings)
    if "grid" in settings and engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = SCHEDULER
    engine_args.kv_transfer_config = KVTransferConfig(**config)
    logger.info(
        "kvtier: added %s, as the environment asks: %s", config["kv_connector"], shown(settings)
    )
