"""Which index is used: the one place that decides it."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier._hot import NATIVE, NATIVE_REASON
from kvtier.index.block_index import BlockIndex
from kvtier.index.native_index import NativeIndex
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.python_index import PythonIndex


def make_index(policies: Mapping[str, EvictionPolicy]) -> BlockIndex:
    """The native index where it can do what ``policies`` do, its Python twin elsewhere.

    policies: per tier, fastest tier first; the order of the mapping is the order of the ladder.
    """
    if not NATIVE:
        return PythonIndex(policies, because=f"native core: {NATIVE_REASON}")
    names: dict[str, str] = {}
    for tier, policy in policies.items():
        # Only what the class says of itself: a class derived from ours may choose otherwise.
        name = vars(type(policy)).get("native_name", "")
        if not name:
            return PythonIndex(policies, because=f"{type(policy).__name__} is a policy in Python")
        names[tier] = name
    return NativeIndex(names)
