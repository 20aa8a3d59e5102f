"""Under vLLM: a host tier behind vLLM's own OffloadingConnector, on any device that kvtier serves.

    scheduler process                              one worker process per rank
    KvtierSpec.get_manager -> manager.py           KvtierSpec.get_worker -> worker.py
    which chunk of KV is in which slot             copies between vLLM's tensors and its own slots

A chunk is ``blocks_per_chunk`` of vLLM's blocks of one KV group, named by vLLM's own hash. The
scheduler decides; every rank keeps its shard of a chunk in the same slot and does what it is told.
``chunks.py`` and ``pages.py`` know nothing of vLLM.
"""

from __future__ import annotations

import logging
from contextlib import suppress

logger = logging.getLogger(__name__)

SPEC_NAME = "kvtier"
VERSIONS = "0.32"
"""Of vLLM, that this was run with."""


def register() -> None:
    """Make ``"spec_name": "kvtier"`` known. vLLM calls it in each of its processes (entry point
    group ``vllm.general_plugins``), whether kvtier is asked for or not: so it never raises."""
    try:
        from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker  # noqa: F401
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError as error:
        logger.warning(
            "kvtier can't be used by this vLLM: it was made for %s, and here %s", VERSIONS, error
        )
        return
    with suppress(ValueError):  # known already: one process may load its plug-ins twice
        OffloadingSpecFactory.register_spec(SPEC_NAME, "kvtier.connectors.vllm.spec", "KvtierSpec")
