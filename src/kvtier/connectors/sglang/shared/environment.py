"""Adds kvtier to an SGLang whose environment asks for it, and whose options name no other storage.

SGLang loads its plug-ins before it reads its options. The hooked method of ``ServerArgs``, which
derives options from each other, finds what ``kvtier sglang-args`` would have printed.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from kvtier.connectors.common.environment import (
    asked,
    naming_variables,
    settings_in_environment,
    shown,
)
from kvtier.connectors.sglang.shared.server_options import server_options, settings_kind
from kvtier.connectors.sglang.shared.settings import LinkerSettings
from kvtier.core.errors import ConfigError

logger = logging.getLogger(__name__)

LINKER_EXCLUDES: Final = ("enable_hierarchical_cache",)
EXCLUDED: Final = (
    "disable_radix_cache",
    "enable_lmcache",
    "hicache_storage_backend",
    "enable_unified_cache_external_linker",
)
"""Options that say otherwise, by the fields of ``ServerArgs``; those of newer versions may be
missing."""


def hooked_method(server_args: type) -> str:
    """Return the method that derives SGLang's options: up to 0.5.22, the constructor's."""
    return "resolve_once" if hasattr(server_args, "resolve_once") else "__post_init__"


def add_storage(server_args: Any, *_: object, **__: object) -> None:
    """Set kvtier's options in ``ServerArgs`` by the variables of the environment.

    Options that name kvtier are left as they are, also those set by an earlier call. Raises
    ``ConfigError`` for options that exclude kvtier, and for values that can't be read.
    """
    variables = " and ".join(asked())
    if not variables or _names_kvtier(server_args):
        return
    kind = settings_kind(settings_in_environment(LinkerSettings))
    settings = settings_in_environment(kind)
    excluded = EXCLUDED + (LINKER_EXCLUDES if kind is LinkerSettings else ())
    for name in excluded:
        if getattr(server_args, name, None):
            raise ConfigError(
                f"{variables} in the environment asks for kvtier, which can't be combined with "
                f"--{name.replace('_', '-')}: leave one of them out"
            )
    with naming_variables(kind):
        options = server_options(settings)
    missing = [name for name in options if not hasattr(server_args, name)]
    if missing:
        raise ConfigError(
            f"{variables} in the environment asks for kvtier's linker, which needs SGLang 0.5.23 "
            "or newer: leave KVTIER_HOST_CAPACITY out, and size SGLang's own host memory"
        )
    for name, value in options.items():
        setattr(server_args, name, value)
    front = "linker" if kind is LinkerSettings else "storage back end"
    logger.info("kvtier: added its %s, as the environment asks: %s", front, shown(settings))


def _names_kvtier(server_args: Any) -> bool:
    fields = ("hicache_storage_backend_extra_config", "unified_cache_external_linker_config")
    return any("kvtier." in str(getattr(server_args, name, None)) for name in fields)
