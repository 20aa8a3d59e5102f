"""Refusal, at the start, of engines whose KV kvtier's secondary tier cannot keep on disk.

vLLM gives a tier only a block's key. Blocks whose key holds a name instead of content cannot be
distinguished from others (key_scope.py), so the engine is refused as a whole. vLLM does not give a
tier the engine's configuration, either. kvtier's connector does, which vLLM makes if this tier is
configured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from kvtier.connectors.vllm.shared.key_scope import counts_media, takes_media
from kvtier.connectors.vllm.standalone.settings import TierSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ENGINE: ContextVar[VllmConfig | None] = ContextVar("configuration of vLLM's", default=None)
INSTEAD = 'use kvtier as a whole ("spec_name": "kvtier"), which keeps such KV off the disk'


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
    """Raise ``ConfigError`` for an engine with keys of no content, unless ``namespace`` is set."""
    config = _ENGINE.get()
    if config is not None and counts_media(config):
        raise TierSettings.wrong(
            "vLLM counts images, video and audio where prefix caching and the processor's cache "
            "are both off, and starts again in each process; leave one of them on, or "
            f"{INSTEAD}"
        )
    if settings.namespace:
        return
    if config is None:
        raise TierSettings.wrong(
            "this tier was not made by kvtier's OffloadingConnector, so nothing shows whether the "
            "engine serves adapters, images or embeddings; set 'namespace' to any text, if it "
            "serves none"
        )
    if config.lora_config is not None:
        raise TierSettings.wrong(
            "adapters (--enable-lora): vLLM's keys hold an adapter's name and path, and another "
            f"one may lie there next time; {INSTEAD}, or set 'namespace' to a text that changes "
            "with your adapters"
        )
    if takes_media(config):
        raise TierSettings.wrong(
            "images, video and audio: vLLM's keys hold an identifier of them, which a client may "
            "choose (multi_modal_uuids), and another one may be called so next time; "
            f"{INSTEAD}, or set 'namespace' to a text, if none of your clients chooses identifiers"
        )
    if config.model_config.enable_prompt_embeds:
        raise TierSettings.wrong(
            "embeddings (--enable-prompt-embeds): vLLM's keys hold their bytes without type and "
            f"shape; {INSTEAD}, or set 'namespace' to a text, if all your clients send one type"
        )
