"""Settings of ``"type": "kvtier"`` among vLLM's ``secondary_tiers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtier.connectors.common.settings import ConnectorSettings
from kvtier.core.config import setting

EXAMPLE = '{"type": "kvtier", "disk_path": "/nvme/kvtier", "disk_capacity": "200GiB"}'


@dataclass(frozen=True)
class TierSettings(ConnectorSettings):
    """Settings of kvtier's tier, and the settings of vLLM's tiers that it has to know."""

    option: ClassVar[str] = "secondary tier kvtier"
    own: ClassVar[frozenset[str]] = frozenset({"type", "module_path", "backpressure"})

    enable_kv_events: bool = setting(
        False, "Publish what is stored here and what leaves, where vLLM publishes KV events at all."
    )
    locality: str | None = setting(
        None,
        'vLLM\'s: whether the disk is "LOCAL" or "REMOTE", for requests that ask for one of them.',
        advice="write it in quotes",
    )

    def __post_init__(self) -> None:
        ConnectorSettings.__post_init__(self)
        if not self.disk_path:
            raise self.wrong(f"disk_path is missing; write {EXAMPLE}")
        if self.locality not in (None, "LOCAL", "REMOTE"):
            raise self.wrong(f"locality can't be {self.locality!r}; use LOCAL or REMOTE")
        if self.record:
            raise self.wrong(
                "record stands beside secondary_tiers, in kv_connector_extra_config: a tier does "
                "not see all requests"
            )
        self.disk_options()
