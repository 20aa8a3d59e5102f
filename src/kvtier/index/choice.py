"""Choice between the native index and the Python one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.index.key_index import KeyIndex
from kvtier.index.native_index import NativeIndex
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.policies.lru import LruPolicy
from kvtier.index.policies.replayed import LRU
from kvtier.index.prompt_index import PromptIndex
from kvtier.index.python_index import PythonIndex
from kvtier.index.python_key_index import PythonKeyIndex

_log = logging.getLogger(__name__)


def make_index(policies: Mapping[str, str | EvictionPolicy]) -> PromptIndex:
    """Make the native index, or the Python one for policies in Python or without the native core.

    policies: policy of each tier, fastest tier first: one of ``POLICIES``, or a policy in Python.
    """
    names: dict[str, str] = {}
    in_python: dict[str, EvictionPolicy] = {}
    for tier, policy in policies.items():
        if isinstance(policy, EvictionPolicy):
            in_python[tier] = policy
        else:
            names[tier] = policy
    if NATIVE and not in_python:
        return NativeIndex(names)
    because = f"native core: {NATIVE_REASON}"
    if NATIVE:
        because = f"{type(next(iter(in_python.values()))).__name__} is a policy in Python"
    else:
        _warn_of_lru(names.values())
    return PythonIndex({tier: in_python.get(tier) or LruPolicy() for tier in policies}, because)


def make_key_index(
    policies: Mapping[str, str], namespace: Callable[[], bytes], group_bytes: int = 0
) -> KeyIndex:
    """Make the native key index, or the Python one if the native core is missing.

    The parameters are those of ``KeyIndex``.
    """
    if NATIVE:
        return NativeKeyIndex(policies, namespace, group_bytes)
    _warn_of_lru(policies.values())
    return PythonKeyIndex(tuple(policies), namespace, f"native core: {NATIVE_REASON}")


def _warn_of_lru(names: Collection[str]) -> None:
    """Log that LRU replaces policies that only the native core has."""
    for name in sorted({*names} - {LRU}):
        _log.warning(
            "eviction_policy=%s needs the native core (%s): lru is used instead",
            name,
            NATIVE_REASON,
        )
