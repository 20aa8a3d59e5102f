"""transformers: every prompt of a model reuses the KV of earlier ones.

    kvtier.attach(model, host_capacity="8GiB", disk_path="/nvme/kv")
    model.generate(**inputs)  # and pipelines, chats, streamers: unchanged

``attached.py`` has the wrapper around a model's ``forward``. ``prompts.py`` decides which calls
begin prompts; other calls are passed through. ``grid.py`` computes prompts in chunks.
``weights_in_memory.py`` identifies a loaded model by its tensors and the objects that ``reach.py``
finds. ``watch.py`` detects changes of these. ``cache_layers`` copies KV between transformers' cache
layers and blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.core.config import CacheConfig, check_share, parse_size
from kvtier.core.errors import ConfigError, UsageError, install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtier.connectors.transformers.attached import Attached

CHUNK_TOKENS = 256
"""Default grid. Smaller chunks are shared more finely, and make a cold prompt slower."""


def attach(
    model: PreTrainedModel,
    host_capacity: str | int = "4GiB",
    disk_path: str | tuple[str, ...] = "",
    disk_capacity: str | int = "10GiB",
    storage: tuple[str, ...] = (),
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    keep_generated: bool = True,
    salt: str = "",
    audit: float = 0.0,
    settings: CacheConfig | None = None,
) -> Attached:
    """Make every use of a transformers model reuse the KV of prompts that begin alike.

    ``generate``, pipelines and plain calls with a cache go on as before, on any thread. Prompts are
    computed in chunks; answers equal those of ``generate(prefill_chunk_size=chunk_tokens)``, bit
    for bit, whether their KV was computed, in memory, or on disk. Other calls are passed through
    unchanged; ``model.kvtier.stats()`` counts them, with the reasons.

    Args:
        model: a causal language model.
        host_capacity: host memory for KV: "8GiB", or bytes. It is used as it fills.
        disk_path: folder for KV on a local disk, which later processes find; "" for none. Only one
            process at a time can use it.
        disk_capacity: disk space for it, reserved at once.
        storage: more storage tiers: "s3://..."; see ``CacheConfig``.
        chunk_tokens: tokens per chunk.
        keep_generated: also keep the KV of generated tokens, for the next turn of a chat. Each
            chunk of them is computed once more, on the grid, when it is complete. Batches keep
            prompts only. Models with recurrent layers do it every 4,096 tokens, since it takes a
            snapshot of their state.
        salt: prompts share KV only under equal salts.
        audit: share of prompts with restored KV of which one chunk is computed again first, and
            compared. After a difference all of the prompt is computed, and KV that was kept before
            is not used any more.
        settings: all other settings; those above are set in it.

    Returns:
        What ``model.kvtier`` is from now on. As a context manager it detaches at the end.

    Raises:
        ConfigError: the settings are not possible.
        UsageError: it is no model of transformers, the model is attached already, or transformers
            is not installed.
    """
    try:
        import torch
        from transformers import PreTrainedModel

        from kvtier.connectors.transformers.attached import Attached
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers"):
            raise
        raise UsageError(
            f"{missing.name} is not installed; install it: {install_command('engine')}"
        ) from None
    if isinstance(model, torch.nn.Module):
        model = getattr(model, "get_base_model", lambda: model)()  # of an adapter's wrapper
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"attach: {model!r:.60} is no model of transformers; give what "
            "AutoModelForCausalLM.from_pretrained(...) returns"
        )
    if isinstance(getattr(model, "kvtier", None), Attached):
        raise UsageError("the model is attached already; detach it first")
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens: {chunk_tokens} is below 1")
    config = replace(
        settings or CacheConfig(),
        host_capacity=0,
        disk_path=disk_path,
        disk_capacity=disk_capacity,
        storage=tuple(storage),
    ).titled(model.config.name_or_path or "")
    check_share(audit)
    capacity_bytes = parse_size(host_capacity, "host_capacity")
    return Attached(model, config, capacity_bytes, chunk_tokens, keep_generated, salt, audit)
