"""Names of vLLM's blocks outside the process, and the source of their weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from kvtier.connectors.common.names import BlockNames as SharedNames
from kvtier.connectors.common.weights import Source
from kvtier.connectors.vllm.shared.engine_facts import EngineFacts
from kvtier.connectors.vllm.shared.identity import namespace

FROM_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats of vLLM's that read the model's own files, and nothing else."""


class VllmNames(SharedNames):
    """Names of one engine's blocks. The scheduler's process makes them and sends them to the ranks.

    Args:
        facts: the engine's facts.
        bytes_per_block: on all ranks that keep a block together, or on one rank.
        engine: name and version of the engine.
        salt: the user's ``namespace``.

    Attributes:
        needs_layout: blocks have no name before ``tell_layout``.
    """

    def __init__(
        self, facts: EngineFacts, bytes_per_block: int, engine: str, salt: str = ""
    ) -> None:
        def digest_of(weights: str) -> bytes:
            facts = self._facts
            return namespace(facts, bytes_per_block, engine, weights, self._traits, salt).digest

        super().__init__(digest_of, salt)
        self._facts = facts
        self._traits = ""
        self.needs_layout = False

    @property
    def digest(self) -> bytes:
        """Return the digest of the namespace; b"" while weights or the layout are unknown."""
        return b"" if self.needs_layout else super().digest

    def tell_layout(self, layout: str) -> None:
        """Set the layout of a page's bytes on the ranks, if vLLM's config does not contain it."""
        self._facts = replace(self._facts, kv_cache_layout=layout)
        self.needs_layout = False

    def settle(self, sources: Sequence[Source], traits: str = "") -> None:
        """Set the weights' sources. traits: facts about the model that ``EngineFacts`` lacks."""
        self._traits = traits
        super().settle(sources)

    def disown(self, reason: str = "") -> None:
        super().disown(reason or "its cache was reset, as it is when weights are replaced")


def vllm_source(
    model: str, revision: str = "", download_dir: str = "", load_format: str = "auto"
) -> Source:
    """Return the source from which vLLM loads a model."""
    return Source(
        model,
        revision,
        download_dir,
        load_format,
        is_in_files=load_format in FROM_FILES,
        has_other_hub=os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"),
    )
