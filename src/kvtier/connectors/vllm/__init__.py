"""Under vLLM: host and disk tiers on any device that kvtier serves.

    scheduler's process                          one process per rank
    manager.py   what a front asks, to the       worker.py   copies, device <-> host slots
                 cache below it (BlockCache)                 orders, to a RankExecutor
    promotion.py what plan/decide.py decides,    (blocks: common/paged_pool.py)
                 for one request

A front translates between vLLM and these: offloading/ stands on vLLM's OffloadingConnector and
``v1/kv_offload``, kv_connector/ on its connector interface alone, for older versions. prompt.py,
copies.py, pages.py and engine_facts.py have the types that fronts translate to, and import nothing
of ``v1/kv_offload``. halves.py makes both halves.

How the words translate. What vLLM calls a *chunk*, its unit of offloading (``blocks_per_chunk``,
``OffloadKey``), is a *block* here, as everywhere in kvtier: what one key names. What vLLM calls a
*block* (``gpu_block_size``, ``block_ids``), a place in its own pool, is a *page* here: a block is
``blocks_per_chunk`` pages of one KV group. Settings, classes and fields of vLLM's keep its names,
and so do our metrics, by which dashboards know them.

recording.py records the engine's requests. The ladder decides, in the scheduler's process, for all
ranks (RankMover); every rank keeps its shard of a block in the same host slot and carries out
orders. contract.py says what kvtier relies on, which is compared before anything else (entry.py);
registry.py gives kvtier's connectors to the configurations that ask for them. standalone/ is for
those who keep vLLM's own tiers.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from kvtier.connectors.vllm.offloading.contract import NEWEST, OLDEST
from kvtier.connectors.vllm.shared.registry import OWN_NAME, SPEC_NAME, wrap_factory

logger = logging.getLogger(__name__)


def register() -> None:
    """Make kvtier's connectors, spec, tier and policy known to vLLM by their names.

    vLLM calls it in each of its processes (entry point group ``vllm.general_plugins``), whether
    kvtier is asked for or not: so it never raises.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        wrap_factory(KVConnectorFactory)
        with suppress(ValueError):  # known already: one process may load its plug-ins twice
            # MultiConnector looks up by their names the classes whose statistics it has.
            KVConnectorFactory.register_connector(
                OWN_NAME, "kvtier.connectors.vllm.entry", OWN_NAME
            )
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        with suppress(ValueError):
            OffloadingSpecFactory.register_spec(
                SPEC_NAME, "kvtier.connectors.vllm.entry", "KvtierSpec"
            )
        _register_pieces()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        logger.warning(
            "kvtier can't be used by this vLLM: made for %s to %s, it met %r", OLDEST, NEWEST, error
        )


def _register_pieces() -> None:
    """For those who keep vLLM's own host tier: a tier below it, and a policy for it."""
    try:
        from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
        from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector  # noqa: F401
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        logger.info("this vLLM has no place for kvtier's tier or policy: %s", error)
        return
    with suppress(ValueError):
        SecondaryTierFactory.register_tier(
            SPEC_NAME, "kvtier.connectors.vllm.standalone.secondary", "KvtierTier"
        )
        CachePolicyFactory.register_cache_policy(
            SPEC_NAME, "kvtier.connectors.vllm.standalone.policy", "KvtierPolicy"
        )
