"""Settings of ``"type": "kvtier"`` among vLLM's ``secondary_tiers``, and engines it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.connectors.common.settings import ConnectorSettings
from kvtier.connectors.vllm.shared.key_scope import counts_media, takes_media
from kvtier.core.config import setting

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXAMPLE = '{"type": "kvtier", "disk_path": "/nvme/kvtier", "disk_capacity": "200GiB"}'
_ENGINE: ContextVar[VllmConfig | None] = ContextVar("configuration of vLLM's", default=None)
INSTEAD = 'use kvtier as a whole ("spec_name": "kvtier"), which keeps such KV off the disk'


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


@contextmanager
def engine_of(config: VllmConfig) -> Iterator[None]:
    """Provide the engine's configuration to tiers that are made in this context."""
    token = _ENGINE.set(config)
    try:
        yield
    finally:
        _ENGINE.reset(token)


def current_engine() -> VllmConfig | None:
    """Return the configuration of the engine that tiers are made for; None if it is not known."""
    return _ENGINE.get()


def refuse(settings: TierSettings) -> None:
    """Raise ``ConfigError`` for an engine with keys of no content, unless ``namespace`` is set.

    vLLM gives a tier only a block's key. Blocks whose key holds a name instead of content cannot be
    distinguished from others (key_scope.py), so the engine is refused as a whole. vLLM does not
    give a tier the engine's configuration, either. kvtier's connector does, which vLLM makes if
    this tier is configured.
    """
    config = _ENGINE.get()
    if config is not None and counts_media(config):
        raise settings.wrong(
            "vLLM counts images, video and audio where prefix caching and the processor's cache "
            "are both off, and starts again in each process; leave one of them on, or "
            f"{INSTEAD}"
        )
    if settings.namespace:
        return
    if config is None:
        raise settings.wrong(
            "this tier was not made by kvtier's OffloadingConnector, so nothing shows whether the "
            "engine serves adapters, images or embeddings; set 'namespace' to any text, if it "
            "serves none"
        )
    if config.lora_config is not None:
        raise settings.wrong(
            "adapters (--enable-lora): vLLM's keys hold an adapter's name and path, and another "
            f"one may lie there next time; {INSTEAD}, or set 'namespace' to a text that changes "
            "with your adapters"
        )
    if takes_media(config):
        raise settings.wrong(
            "images, video and audio: vLLM's keys hold an identifier of them, which a client may "
            "choose (multi_modal_uuids), and another one may be called so next time; "
            f"{INSTEAD}, or set 'namespace' to a text, if none of your clients chooses identifiers"
        )
    if config.model_config.enable_prompt_embeds:
        raise settings.wrong(
            "embeddings (--enable-prompt-embeds): vLLM's keys hold their bytes without type and "
            f"shape; {INSTEAD}, or set 'namespace' to a text, if all your clients send one type"
        )
