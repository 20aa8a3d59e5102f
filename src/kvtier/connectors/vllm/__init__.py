"""Under vLLM: host and disk tiers behind its OffloadingConnector, on any device that kvtier serves.

    scheduler's process                        one process per rank
    manager.py    what vLLM asks               worker.py      copies, device <-> host slots
    placement.py  what is where, what moves    rank_disk.py   moves, host slots <-> slab
    judge.py      load or compute, how long    pages.py       vLLM's tensors as pages
                  to wait

connector.py carries orders one way and reports the other; spec.py makes the two halves. A chunk is
``blocks_per_chunk`` of vLLM's blocks of one KV group, named by vLLM's own hash. The scheduler
decides; every rank keeps its shard of a chunk in the same host slot and does what it is told.
Only connector, manager, names, spec and worker know vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

SPEC_NAME = "kvtier"
CONNECTOR_NAME = "OffloadingConnector"
VERSIONS = "0.32"
"""Of vLLM, that this was run with."""


def register() -> None:
    """Make ``"spec_name": "kvtier"`` known. vLLM calls it in each of its processes (entry point
    group ``vllm.general_plugins``), whether kvtier is asked for or not: so it never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker  # noqa: F401
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        connectors = KVConnectorFactory._registry
        theirs = connectors[CONNECTOR_NAME]
    except (ImportError, AttributeError, KeyError) as error:
        logger.warning(
            "kvtier can't be used by this vLLM: it was made for %s, and here %r", VERSIONS, error
        )
        return
    with suppress(ValueError):  # known already: one process may load its plug-ins twice
        OffloadingSpecFactory.register_spec(SPEC_NAME, "kvtier.connectors.vllm.spec", "KvtierSpec")
    if not isinstance(theirs, InPlaceOf):
        connectors[CONNECTOR_NAME] = InPlaceOf(theirs)


class InPlaceOf:
    """Loads the connector of ours that stands in vLLM's place, and makes vLLM's own for whoever
    did not ask for kvtier. theirs: loads vLLM's."""

    def __init__(self, theirs: Callable[[], type]) -> None:
        self._theirs = theirs

    def __call__(self) -> type:
        from kvtier.connectors.vllm.connector import over

        return over(self._theirs())
