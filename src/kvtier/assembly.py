"""Build the ladder of a cache, and its policies and options from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, UsageError
from kvtier.index import BlockIndex
from kvtier.index.policies import EvictionPolicy, LruPolicy
from kvtier.ladder import Ladder, LadderOptions
from kvtier.layout import KVGroup
from kvtier.system.plugins import load_plugin
from kvtier.telemetry import Metrics
from kvtier.tiers import Quota, Room, StorageTier
from kvtier.tiers.row import write_limits
from kvtier.transfer import Mover
from kvtier.types import DEVICE, LoadPolicy, WritePolicy


def build_ladder(
    index: BlockIndex,
    tiers: Mapping[str, Room | StorageTier],
    mover: Mover,
    options: LadderOptions,
    *,
    clock: Callable[[], float],
    device: str | None = None,
    metrics: Metrics | None = None,
) -> Ladder:
    """Build the ladder over ``tiers``; every cache and connector gets its ladder here.

    Args:
        index: shared with the cache, which looks blocks up. It has the same tiers, in this order.
        tiers: memory tiers and then storage tiers, fastest first. A tier of another process is
            represented by its ``Room``.
        mover: moves blocks between these tiers.
        options: see ``LadderOptions``.
        clock: seconds.
        device: name of the memory above the fastest tier, if the engine itself copies between the
            two.
        metrics: by default, metrics that are counted but not exposed.

    Raises:
        UsageError: the index has other tiers, or in another order.
    """
    if tuple(index.tiers) != tuple(tiers):
        raise UsageError(
            f"index: it has the tiers {', '.join(index.tiers)}, and the ladder has "
            f"{', '.join(tiers)}; make the index for the ladder's tiers, in their order"
        )
    return Ladder(
        index,
        {name: _room(tier) for name, tier in tiers.items()},
        mover,
        options=options,
        clock=clock,
        device=device,
        metrics=metrics or Metrics(is_exposed=False),
    )


def _room(tier: Room | StorageTier) -> Room:
    """Return the room for blocks in a tier: its slots in memory, a number of blocks in storage."""
    return Quota(lambda: tier.num_blocks) if isinstance(tier, StorageTier) else tier


def policy_maker(name: str) -> Callable[[str], EvictionPolicy]:
    """Return a function that makes a policy of plug-in ``name`` for a tier.

    The device tier uses LRU instead of a policy that learns from prompts: every block has to pass
    through it, and most evicted blocks are still in the tier below.

    Raises ``ConfigError`` if there is no such policy.
    """
    make = load_plugin("policies", name)

    def made(tier: str) -> EvictionPolicy:
        policy = make()
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(
                f"eviction_policy: {name!r} makes a {type(policy).__name__}, no policy"
            )
        return LruPolicy() if tier == DEVICE and policy.knows_prompts else policy

    return made


def ladder_options(config: CacheConfig, group: KVGroup) -> LadderOptions:
    """Return the ladder's options for blocks of ``group``."""
    block_bytes = group.bytes_per_block
    return LadderOptions(
        block_bytes=block_bytes,
        demotes=config.write_policy is WritePolicy.WRITE_BACK,
        patience_s=config.demote_deadline_s,
        archive_after_uses=config.archive_after_uses,
        bytes_per_day=write_limits(config),
        piece_blocks=max(1, config.load_batch_bytes // block_bytes),
        lookup_patience_s=config.lookup_deadline_s,
        block_size=group.block_size if config.load_policy is LoadPolicy.AUTO else 0,
    )
