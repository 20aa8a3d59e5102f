"""Under vLLM: host and disk tiers on any device that kvtier serves.

    scheduler's process                          one process per rank
    manager.py   requests of a front, passed     worker.py   copies, device <-> host slots
                 to the cache (BlockCache)                   orders, to a RankExecutor
    promotion.py decisions of plan/decide.py,    (blocks: common/paged_pool.py)
                 applied to one request

A front translates between vLLM and these modules. offloading/ uses vLLM's OffloadingConnector and
``v1/kv_offload``; kv_connector/ uses only the connector interface, for older versions. prompt.py,
copies.py, pages.py and names.py have the types that fronts translate to, and import nothing
of ``v1/kv_offload``. halves.py makes both halves.

Terms. A *block* is what one key names, here as everywhere in kvtier: vLLM calls it a *chunk*, its
unit of offloading (``blocks_per_chunk``, ``OffloadKey``). A *page* is a place in vLLM's own pool:
vLLM calls it a *block* (``gpu_block_size``, ``block_ids``). A block is ``blocks_per_chunk`` pages
of one KV group. Settings, classes and fields of vLLM keep its names. So do kvtier's metrics under
vLLM, since dashboards know them by these.

recording.py records the engine's requests. The ladder decides, in the scheduler's process, for all
ranks (RankMover); every rank keeps its shard of a block in the same host slot and carries out
orders. contract.py lists what kvtier relies on; entry.py compares it before anything else.
registry.py returns kvtier's connectors for configurations that name them; environment.py names them
if variables of the environment ask for it. standalone/ has a tier
and a policy for vLLM's own tiers.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from kvtier.connectors.common.environment import asked
from kvtier.connectors.vllm.offloading.contract import NEWEST, OLDEST
from kvtier.connectors.vllm.shared.registry import OWN_NAME, SPEC_NAME, wrap_factory

logger = logging.getLogger(__name__)


def register() -> None:
    """Make kvtier's connectors, spec, tier and policy known to vLLM by their names.

    vLLM calls it in each of its processes (entry point group ``vllm.general_plugins``), also if its
    configuration does not name kvtier. It therefore never raises.
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
        if asked():
            _wrap_engine_args()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        logger.warning(
            "kvtier can't be used by this vLLM: made for %s to %s, it met %r", OLDEST, NEWEST, error
        )


def _wrap_engine_args() -> None:
    """Have vLLM add kvtier's connector by itself."""
    from vllm.engine.arg_utils import EngineArgs

    from kvtier.connectors.vllm.shared.environment import wrap_engine_args

    wrap_engine_args(EngineArgs)


def _register_pieces() -> None:
    """Register a secondary tier and an eviction policy for vLLM's own host tier."""
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
