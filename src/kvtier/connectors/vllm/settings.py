"""What a user may set in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from kvtier.config import parse_size
from kvtier.errors import ConfigError

VLLMS_OWN = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
    }
)
"""Settings of the OffloadingConnector itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Ours. Sizes may be written "8GiB"."""

    host: str | int = "4GiB"
    """Host DRAM for KV, of all ranks together."""

    @property
    def host_bytes(self) -> int:
        return parse_size(self.host, "host")

    @classmethod
    def read(cls, extra_config: Mapping[str, object]) -> Settings:
        """Raises ``ConfigError`` for a key that nobody knows, or a value that can't be read."""
        known = {field.name for field in fields(cls)}
        for key in extra_config:
            if key not in known | VLLMS_OWN:
                near = get_close_matches(key, sorted(known | VLLMS_OWN), 1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
                )
                raise ConfigError(
                    f"kv_connector_extra_config: no setting is called {key!r}; {hint}"
                )
        given = {key: value for key, value in extra_config.items() if key in known}
        for key, value in given.items():
            if not isinstance(value, str | int):
                raise ConfigError(f'{key}: {value!r} is no size; write for instance "8GiB"')
        settings = cls(**given)  # type: ignore[arg-type]
        if settings.host_bytes < 1:
            raise ConfigError(f'host: {settings.host!r} is no room at all; write "8GiB"')
        return settings
