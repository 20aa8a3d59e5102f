"""Choice between the native index and the Python one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.index.key_index import KeyIndex
from kvtier.index.native_index import NativeIndex
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.index.prompt_index import PromptIndex
from kvtier.index.python_index import PythonIndex
from kvtier.index.python_key_index import PythonKeyIndex

_log = logging.getLogger(__name__)


def make_index(policies: Mapping[str, EvictionPolicy]) -> PromptIndex:
    """Make the native index if it implements all of ``policies``, else the Python index.

    policies: policy of each tier, fastest tier first.
    """
    if not NATIVE:
        _warn_of_lru({policy.native_name for policy in policies.values()})
        return PythonIndex(policies, because=f"native core: {NATIVE_REASON}")
    names: dict[str, str] = {}
    for tier, policy in policies.items():
        # Only the class's own attribute counts: a derived class may choose victims differently.
        name = vars(type(policy)).get("native_name", "")
        if not name:
            because = f"{type(policy).__name__} is a policy in Python"
            return PythonIndex(policies, because=because)
        names[tier] = name
    return NativeIndex(names)


def make_key_index(
    tiers: Sequence[str],
    namespace: Callable[[], bytes],
    learning: Collection[str] = (),
    policy: str = RUNS,
    group_bytes: int = 0,
) -> KeyIndex:
    """Make the native key index, or the Python one if the native core is missing.

    The parameters are those of ``KeyIndex``.
    """
    if not NATIVE:
        if learning:
            _warn_of_lru({policy})
        because = f"native core: {NATIVE_REASON}"
        return PythonKeyIndex(tiers, namespace, because)
    return NativeKeyIndex(tiers, namespace, learning, policy, group_bytes)


def _warn_of_lru(names: Collection[str]) -> None:
    """Log that LRU replaces policies that only the native core has."""
    for name in sorted({*names} - {LRU, ""}):
        _log.warning(
            "eviction_policy=%s needs the native core (%s): lru is used instead",
            name,
            NATIVE_REASON,
        )
