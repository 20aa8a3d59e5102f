"""Policies and ladder options from a configuration."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.ladder import LadderOptions
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import known_plugins, load_plugin
from kvtier.core.types import DEVICE, LoadPolicy, WritePolicy
from kvtier.index.policies import EvictionPolicy
from kvtier.index.policies.replayed import LRU, POLICIES
from kvtier.layout import KVGroup
from kvtier.tiers.row import write_limits


def policy_maker(name: str) -> Callable[[str], str | EvictionPolicy]:
    """Return a function that returns the policy of a tier: its name, or an object of a plug-in.

    The device tier uses LRU instead of a policy that learns from prompts: every block has to pass
    through it, and most evicted blocks are still in the tier below.

    Raises ``ConfigError`` if there is no such policy.

    name: one of ``POLICIES``, or an entry point of ``kvtier.policies``.
    """
    if name in POLICIES:
        return lambda tier: LRU if tier == DEVICE else name
    if name not in (plugins := known_plugins("policies")):
        raise ConfigError(
            f"eviction_policy: {name!r} is unknown; use one of "
            f"{', '.join(dict.fromkeys((*POLICIES, *plugins)))}, or install the package that "
            "brings it"
        )
    make = load_plugin("policies", name)

    def made(tier: str) -> str | EvictionPolicy:
        policy = make()
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(
                f"eviction_policy: {name!r} makes a {type(policy).__name__}, no policy"
            )
        return LRU if tier == DEVICE and policy.knows_prompts else policy

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
