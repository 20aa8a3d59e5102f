"""Scope of a request's keys: up to which token they name content.

vLLM's keys hash a prompt's tokens and its ``cache_salt``. They also hash names: an adapter's name
and path (``adapters.py`` replaces them by its content), and an identifier of each image, video or
audio. A name is not content, and another process may give the same name to something else. A client
may choose an identifier (``multi_modal_uuids``), and vLLM numbers its inputs if all its caches are
off. An identifier does not show whether it is a hash of the content.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from kvtier.connectors.vllm.shared.grid import end_on_grid

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvtier.connectors.vllm.shared.adapters import AdapterLoad

ALL = sys.maxsize
"""Tokens: no limit."""


class Doubt(Flag):
    """Reasons not to keep what was computed for a request."""

    NONE = 0
    WEIGHTS = auto()
    """The device may have KV of it of earlier weights."""
    ADAPTER = auto()
    """vLLM may have computed it with another adapter."""
    PAGES = auto()
    """Pages that its blocks were copied from may have been wrong."""


@dataclass(slots=True)
class KeyScope:
    """Decides which of a request's blocks may be kept, and where.

    Attributes:
        shared: blocks that end at this prompt token or before go to storage, and come from there.
        kept: blocks that end at this token or before are kept in this process, others nowhere.
        adapter: the load of the adapter that the request is computed with.
        doubts: reasons not to keep what was computed.
    """

    shared: int = ALL
    kept: int = ALL
    adapter: AdapterLoad | None = None
    doubts: Doubt = Doubt.NONE

    def begin_look_up(self, num_computed: int) -> None:
        """Note that vLLM has found ``num_computed`` tokens in its own pool."""
        if self.adapter is not None and not self.adapter.keeps(num_computed):
            self.doubts |= Doubt.ADAPTER

    @property
    def is_open(self) -> bool:
        """Whether any block may be kept: the KV is of the adapter and the weights of now."""
        return not self.doubts & (Doubt.WEIGHTS | Doubt.ADAPTER)

    def is_computed_right(self) -> bool:
        """Whether KV is of the tokens and the adapter that its keys name, and of one model."""
        if self.adapter is not None and not self.adapter.holds():
            self.doubts |= Doubt.ADAPTER
        return not self.doubts


def scope_of(
    request: Request, counts_media: bool, names_adapter: bool = False, grid: int = 0
) -> KeyScope:
    """Return the scope of a request's keys.

    Args:
        request: A request of vLLM's, when it is added.
        counts_media: Whether vLLM names media by a counter, see ``counts_media``.
        names_adapter: Whether the keys name the content of the request's adapter, if it has one.
        grid: Tokens in a cell; 0 without a grid.
    """
    kept = end_on_grid(request, grid) if grid else _before_media(request, counts_media)
    is_named = request.lora_request is None or names_adapter
    # An embedding is hashed without its type and shape, and the rest of a session comes later.
    if not is_named or request.prompt_embeds is not None or request.resumable:
        return KeyScope(0, kept)
    if not request.mm_features:
        return KeyScope(kept=kept)
    return KeyScope(_first_media(request), kept)


def counts_media(config: VllmConfig) -> bool:
    """Whether vLLM names media by a counter, as it does if none of its own caches needs their hash.

    Names that clients give count as well: they cannot be distinguished from a counter.
    """
    media = config.model_config.multimodal_config
    if not takes_media(config) or config.cache_config.enable_prefix_caching:
        return False
    return float(media.mm_processor_cache_gb) == 0


def takes_media(config: VllmConfig) -> bool:
    """Whether vLLM takes images, video or audio: its model does, and its options leave them on."""
    media = config.model_config.multimodal_config
    if media is None:
        return False
    return not media.language_model_only or bool(media.enable_mm_embeds)


def _before_media(request: Request, counts_media: bool) -> int:
    return _first_media(request) if counts_media and request.mm_features else ALL


def _first_media(request: Request) -> int:
    return min(int(mm_feature.mm_position.offset) for mm_feature in request.mm_features)
