"""Which index is used: the one place that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier._hot import NATIVE, NATIVE_REASON
from kvtier.index.block_index import BlockIndex
from kvtier.index.groups import ALL, ReuseRule
from kvtier.index.native_index import NativeIndex
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.python_index import PythonIndex
from kvtier.types import AnyColumn


def make_index(
    policies: Mapping[AnyColumn, EvictionPolicy], rules: Sequence[ReuseRule] = (ALL,)
) -> BlockIndex:
    """The native index where it can do what ``policies`` do, its Python twin elsewhere.

    policies: per column; those of the first group by their tiers' names, fastest tier first, which
    is the order of the ladder. rules: per group, see ``groups.rules_of``.
    """
    if not NATIVE:
        return PythonIndex(policies, rules, because=f"native core: {NATIVE_REASON}")
    names: dict[AnyColumn, str] = {}
    for column, policy in policies.items():
        # Only what the class says of itself: a class derived from ours may choose otherwise.
        name = vars(type(policy)).get("native_name", "")
        if not name:
            because = f"{type(policy).__name__} is a policy in Python"
            return PythonIndex(policies, rules, because=because)
        names[column] = name
    return NativeIndex(names, rules)
