"""Options of SGLang that enable kvtier, by the fields of its ``ServerArgs``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings

ENTRY: Final = "kvtier.connectors.sglang.entry"
"""Module that SGLang loads."""


def settings_kind(settings: Mapping[str, object]) -> type[LinkerSettings | StorageSettings]:
    """Return the front for these settings: the linker, if kvtier is to have host memory."""
    return LinkerSettings if "host_capacity" in settings else StorageSettings


def server_options(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return SGLang's options by name; the last one has the settings.

    Raises ``ConfigError`` for settings that kvtier would refuse inside SGLang.
    """
    settings_kind(settings).read(settings)
    if settings_kind(settings) is LinkerSettings:
        linker = {
            "linker": "KvtierLinker",
            "linker_module_path": ENTRY,
            "linker_extra_config": settings,
        }
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": linker,
        }
    storage = {
        "backend_name": "kvtier",
        "module_path": ENTRY,
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        **settings,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(storage, separators=(",", ":")),
    }
