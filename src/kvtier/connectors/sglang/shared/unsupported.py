"""Check at start for options that kvtier cannot serve. Each error is one sentence."""

from __future__ import annotations

from kvtier.connectors.common.settings import StoreSettings
from kvtier.connectors.sglang.shared.ranks import RankConfig
from kvtier.connectors.sglang.shared.settings import LinkerSettings
from kvtier.core.errors import ConfigError


def refuse(config: RankConfig, options: object, settings: StoreSettings) -> None:
    """Raise ``ConfigError`` for an engine whose pages can't be kept.

    options: SGLang's ``ServerArgs``, or None.
    """
    if getattr(config, "dcp_size", 1) > 1:
        raise ConfigError(
            f"decode context parallelism of {config.dcp_size}: pages are cut over its ranks, and "
            "SGLang takes no plug-in for them; leave --dcp-size at 1, or use its file back end"
        )
    if isinstance(settings, LinkerSettings) and config.pp_size > 1:
        raise ConfigError(
            f"pipeline parallelism of {config.pp_size}: each stage looks KV up for itself, and "
            "SGLang does not bring them to one answer; leave --pp-size at 1, or use the storage "
            "back end"
        )
    num_machines = getattr(options, "nnodes", 1) or 1
    if config.is_mla_model and num_machines > 1 and settings.disk_path:
        raise ConfigError(
            f"an MLA model on {num_machines} machines: one rank writes for all of them, and the "
            "others do not see its local disk; serve on one machine, or without storage"
        )
    has_adapters = getattr(options, "enable_lora", False)
    if has_adapters and settings.has_storage and not settings.namespace:
        raise ConfigError(
            "adapters (--enable-lora): SGLang's keys hold an adapter's name and path, and another "
            "one may lie there next time; serve without storage, or set 'namespace' to a text that "
            "changes with your adapters"
        )
    if settings.has_storage and not settings.namespace and _takes_media(options):
        raise ConfigError(
            "images, video and audio: SGLang's keys hold a hash of them, which a client may choose "
            "(mm_hashes), and another one may be called so next time; serve without storage, or "
            "set 'namespace' to a text, if none of your clients chooses hashes"
        )


def _takes_media(options: object) -> bool:
    """Whether SGLang serves a model that takes images, video or audio.

    options: its ``ServerArgs``.
    """
    if not hasattr(options, "model_path"):
        return False
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig.from_server_args(options)
    return bool(model.is_multimodal or model.is_audio_model)
